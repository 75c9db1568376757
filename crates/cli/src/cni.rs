//! Checks container ids, network names and interface names by the rules of the CNI specification. A runtime must not
//! pass an invalid name to a plugin, and the plugin refuses invalid names. Addresses that were recorded under an
//! invalid name could never be released, because the plugin would refuse their DEL.

/// Maximum length of an interface name in the Linux kernel, in bytes.
const MAX_INTERFACE_BYTES: usize = 15;

/// True for a valid container id or network name: a letter or digit, then letters, digits and `_.-`.
pub(crate) fn is_cni_name(id: &str) -> bool {
    id.starts_with(|first: char| first.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

pub(crate) fn is_interface_name(name: &str) -> bool {
    (1..=MAX_INTERFACE_BYTES).contains(&name.len())
        && !matches!(name, "." | "..")
        && !name.contains(|c: char| matches!(c, '/' | ':' | '\0') || c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cni_names_match_what_plugin_takes() {
        for (id, is_id) in [("0a", true), ("A_.-9", true), ("", false), ("-a", false), ("x y", false), ("\0", false)] {
            assert_eq!(is_cni_name(id), is_id, "{id:?}");
        }
        let longest = "a".repeat(MAX_INTERFACE_BYTES);
        for (name, is_name) in [("eth0", true), (&longest[..], true), ("eth0@if3", true), ("", false), (".", false)] {
            assert_eq!(is_interface_name(name), is_name, "{name:?}");
        }
        for name in ["..", "a/b", "a:1", "a b", "a\0", &format!("{longest}a")] {
            assert!(!is_interface_name(name), "{name:?}");
        }
    }
}
