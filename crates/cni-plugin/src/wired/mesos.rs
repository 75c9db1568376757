//! Labels that Mesos hands to a container, made fit for a label.

use ipam_core::model::Labels;

/// The label that names the endpoint's namespace, before it is cleaned.
const NAMESPACE: &str = "projectcalico.org/namespace";

/// The cleaned labels, and the namespace that one of them names.
pub(super) fn labels(stated: &[(String, String)]) -> (Labels, Option<String>) {
    let mut namespace = None;
    let mut labels = Labels::new();
    for (key, value) in stated {
        let value = clean(value);
        if key == NAMESPACE {
            namespace = Some(value.clone());
        }
        labels.insert(clean(key), value);
    }
    (labels, namespace)
}

/// Calico's rule: a slash is a dot; other characters that no label has become one dash; dots and dashes in a row that have a
/// dot among them become one dot; those at both ends go.
fn clean(text: &str) -> String {
    let mut dashed = String::new();
    for c in text.chars() {
        let c = if c == '/' { '.' } else { c };
        let is_allowed = c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        match (is_allowed, dashed.ends_with('\0')) {
            (true, _) => dashed.push(c),
            (false, false) => dashed.push('\0'),
            (false, true) => {}
        }
    }
    let dashed = dashed.replace('\0', "-");
    let mut clean = String::new();
    let mut rest = dashed.as_str();
    while let Some(first) = rest.chars().next() {
        let run: usize = rest.chars().take_while(|c| matches!(c, '.' | '-')).count();
        let (part, after) = rest.split_at(run.max(first.len_utf8()));
        clean.push_str(if run > 0 && part.contains('.') { "." } else { part });
        rest = after;
    }
    clean.trim_matches(['.', '-']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_recorded() {
        let cases =
            [("/a/b/c", "a.b.c"), ("we!rd kéy", "we-rd-k-y"), ("--x..y//z--", "x.y.z"), ("c d", "c-d"), ("v", "v")];
        for (text, expected) in cases {
            assert_eq!(clean(text), expected, "{text}");
        }
        assert_eq!(clean("a-.-b"), "a.b");
        assert_eq!(clean("a--b"), "a--b");
        assert_eq!(clean("!!"), "");
    }

    #[test]
    fn one_label_is_the_namespace() {
        let stated = [(NAMESPACE.to_owned(), "team/blue".to_owned()), ("k".to_owned(), "v".to_owned())];
        let (labels, namespace) = labels(&stated);
        assert_eq!(namespace.as_deref(), Some("team.blue"));
        assert_eq!(labels.get("k").map(String::as_str), Some("v"));
    }
}
