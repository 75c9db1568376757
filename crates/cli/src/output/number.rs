//! Numbers as calicoctl prints them.

/// The number with five significant digits, like C's `%.5g`.
pub(crate) fn five_digits(number: f64) -> String {
    const DIGITS: i32 = 5;
    if number == 0.0 || !number.is_finite() {
        return number.to_string();
    }
    // Rust rounds the mantissa first and so gets the exponent right at 99999.5.
    let scientific = format!("{number:.4e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if !(-4..DIGITS).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", without_zeros(mantissa), exponent.abs());
    }
    let decimals = usize::try_from(DIGITS - 1 - exponent).unwrap_or_default();
    without_zeros(&format!("{number:.decimals$}")).to_owned()
}

fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// A part of a whole: the number and its percentage, such as `10 (0%)`.
pub(crate) fn part(number: f64, whole: f64) -> String {
    let percent = if whole == 0.0 { 0.0 } else { 100.0 * number / whole };
    format!("{} ({percent:.0}%)", five_digits(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_digits_as_in_c() {
        let cases = [
            (0.0, "0"),
            (1.0, "1"),
            (64.0, "64"),
            (65536.0, "65536"),
            (99999.0, "99999"),
            (99999.5, "1e+05"),
            (100_000.0, "1e+05"),
            (1_048_576.0, "1.0486e+06"),
            (16_777_216.0, "1.6777e+07"),
            (2_f64.powi(64), "1.8447e+19"),
            (2_f64.powi(80), "1.2089e+24"),
            (2_f64.powi(128), "3.4028e+38"),
            (0.25, "0.25"),
        ];
        for (number, expected) in cases {
            assert_eq!(five_digits(number), expected);
        }
    }

    #[test]
    fn parts() {
        assert_eq!(part(10.0, 65536.0), "10 (0%)");
        assert_eq!(part(65526.0, 65536.0), "65526 (100%)");
        assert_eq!(part(3.0, 8.0), "3 (38%)");
        assert_eq!(part(0.0, 0.0), "0 (0%)");
    }
}
