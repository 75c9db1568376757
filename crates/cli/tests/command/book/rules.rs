//! Defines which differences are permitted between a command's output in the book and its real output.

use regex_lite::Regex;

/// Patterns for text that differs in each run, each with the placeholder that replaces the text. Runs of spaces or
/// hyphens are shortened, because the width of a table column depends on its content.
const RULES: &[(&str, &str)] = &[
    (
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}(\.[0-9]+)?(Z| \+0000 UTC| [A-Z]{3,4}| ?[+-][0-9]{2}(:?[0-9]{2})?)?",
        "TIME",
    ),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"[0-9a-f]{64}", "SHA256"),
    (r"boot: [0-9a-f]{8}", "boot: BOOT"),
    (r"[0-9]+(\.[0-9]+)? ([KM]i)?B", "SIZE"),
    (r"[0-9]+ \([a-z][-a-z0-9_]+\)", "PROCESS"),
    (r"[0-9]+ (seconds?|minutes?)", "DURATION"),
    (r"passed +[0-9]+\.[0-9]{2}$", "passed SECONDS"),
    (r"ignored in [0-9]+(\.[0-9]+)? s$", "ignored in SECONDS"),
    ("-{2,}", "--"),
    (" {2,}", " "),
];

/// Returns the lines of a text, with placeholders for the text that differs in each run.
fn plain(text: &str) -> Vec<String> {
    let rules: Vec<(Regex, &str)> = RULES.iter().map(|(what, with)| (Regex::new(what).unwrap(), *with)).collect();
    let line = |line: &str| {
        let line = rules.iter().fold(line.to_owned(), |line, (what, with)| what.replace_all(&line, *with).into_owned());
        line.trim_end().to_owned()
    };
    text.trim_end().lines().map(line).collect()
}

/// Returns whether the text of a page agrees with the real output of the commands. A line `...` in the page stands for
/// any number of lines.
pub(crate) fn agree(page: &str, output: &str) -> bool {
    fn fits(page: &[String], output: &[String]) -> bool {
        match page.split_first() {
            None => output.is_empty(),
            Some((line, rest)) if line == "..." => (0..=output.len()).any(|skip| fits(rest, &output[skip..])),
            Some((line, rest)) => output.first() == Some(line) && fits(rest, &output[1..]),
        }
    }
    fits(&plain(page), &plain(output))
}

/// Returns the output of a command, without the line that names the store if the page omits this line.
pub(crate) fn without_store_line(output: &str, page: &str) -> String {
    match output.split_once('\n') {
        Some((first, rest)) if first.starts_with("store: ") && !page.starts_with("store: ") => rest.to_owned(),
        _ => output.to_owned(),
    }
}

#[test]
fn book_comparison_tolerates_only_varying_output() {
    for (page, output, do_agree) in [
        ("| a   | 2026-11-22T04:16:35Z |\n", "| a | 2027-01-01T00:00:00Z |\n", true),
        ("at 2026-11-21 11:27:42.638379174 +0000 UTC\n", "at 2027-11-21 11:27:42.1 +0000 UTC\n", true),
        ("2.01 MiB, 482 B\n", "1.00 MiB, 4.01 KiB\n", true),
        ("passed  0.03\n3 ignored in 0.2 s\n", "passed 12.34\n3 ignored in 5 s\n", true),
        ("passed  0.03\n", "failed  0.03\n", false),
        ("margay_pool_free 0.03\n", "margay_pool_free 0.04\n", false),
        ("revision 4\n", "revision 5\n", false),
        ("a\n...\nd\n", "a\nb\nc\nd\n", true),
        ("a\n...\nd\n", "a\nb\nc\n", false),
        ("a\n", "a\nb\n", false),
        ("10.65.0.1\n", "10.65.0.2\n", false),
    ] {
        assert_eq!(agree(page, output), do_agree, "{page}{output}");
    }
    let reported = "store: sled:///a (the default)\nx\n";
    assert_eq!(
        (without_store_line(reported, "x\n"), without_store_line(reported, reported)),
        ("x\n".to_owned(), reported.to_owned())
    );
}
