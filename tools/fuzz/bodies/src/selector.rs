//! Checks that a printed selector parses to an equal selector, and that both match the same labels.

use ipam_core::model::Labels;
use ipam_core::selector::{MAX_SELECTOR_BYTES, Selector};

/// Runs the fuzz target `selector` on an input. The input is the text of a selector, a line feed, and labels in the
/// form `key=value`, one per line. The text of a selector cannot contain a line feed.
pub fn selector(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (text, labels) = text.split_once('\n').unwrap_or((&text, ""));
    let labels: Labels = labels
        .split('\n')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.into(), value.into()))
        .collect();
    let selector: Selector = match text.parse() {
        Ok(selector) => selector,
        Err(error) => {
            let error: ipam_core::selector::SelectorError = error;
            assert!(error.position() <= text.len().min(MAX_SELECTOR_BYTES), "{error}");
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let shown = selector.to_string();
    // A printed selector may have spaces that its original text lacks, so it may exceed the maximum length.
    if shown.len() <= MAX_SELECTOR_BYTES {
        assert_eq!(shown.parse(), Ok(selector.clone()), "{text} is shown as {shown}");
    }
    let matches = selector.matches(&labels);
    let combined = |text: String| text.parse::<Selector>().map(|selector| selector.matches(&labels));
    if !text.trim_matches([' ', '\t']).is_empty() {
        // Parsing a selector that embeds `text` fails only if the selector becomes too long or nested too deeply.
        assert_ne!(combined(format!("!({text})")), Ok(matches), "{text}");
        assert!(combined(format!("({text}) || all()")).is_ok_and(|all| all) || text.len() > 90, "{text}");
        assert_ne!(combined(format!("({text}) && all()")), Ok(!matches), "{text}");
    }
    assert_eq!(selector.uses_global(), shown_global(&shown), "{shown}");
}

/// Returns true if the printed selector contains `global()` outside of quotes.
fn shown_global(shown: &str) -> bool {
    let (mut rest, mut outside) = (shown, String::new());
    while let Some(start) = rest.find(['\'', '"']) {
        let quote = &rest[start..=start];
        outside.push_str(&rest[..start]);
        outside.push('|');
        let inner = &rest[start + 1..];
        rest = inner.find(quote).map_or("", |end| &inner[end + 1..]);
    }
    outside.push_str(rest);
    outside.contains("global()")
}
