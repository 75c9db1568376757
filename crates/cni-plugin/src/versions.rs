//! Lists the CNI versions that the plugin supports, and checks which verbs each CNI version allows.

use agent::{CniError, Code, Result};

use crate::env::{CniCall, CniVerb};
use crate::gojson::{GoJson, quoted, quoted_list};

/// The CNI versions that the plugin supports, oldest first.
pub const SUPPORTED_VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The newest supported CNI version.
const NEWEST_VERSION: &str = "1.1.0";

/// Returns the output of the verb VERSION, including a trailing newline. The output of VERSION does not depend on the
/// configuration.
pub(crate) fn version_reply() -> String {
    let supported: Vec<_> = SUPPORTED_VERSIONS.iter().map(|version| quoted(version)).collect();
    format!("{{\"cniVersion\":{},\"supportedVersions\":[{}]}}\n", quoted(NEWEST_VERSION), supported.join(","))
}

/// Returns the CNI version that the configuration names. If the configuration's `cniVersion` is absent, null or empty,
/// the CNI version is 0.1.0.
///
/// # Errors
/// CNI error code 6 if the CNI version is not a string.
fn configured(conf: &GoJson) -> Result<&str> {
    let wrong = |kind| {
        let into = "into Go struct field .cniVersion of type string";
        CniError::new(
            Code::Decode,
            format!("decoding version from network config: json: cannot unmarshal {kind} {into}"),
        )
    };
    let version = conf.text_member("cniVersion").map_err(wrong)?;
    Ok(if version.is_empty() { "0.1.0" } else { version })
}

/// Returns the CNI version that the configuration names, after checking that this version has the verb of the plugin
/// call.
///
/// # Errors
/// CNI error code 1 for a CNI version that is not supported or does not have the verb. CNI error code 4 for an unknown
/// CNI verb. Any error of [`configured`].
pub(crate) fn of_call<'c>(call: &CniCall, conf: &'c GoJson) -> Result<&'c str> {
    let since = match call.verb {
        CniVerb::Add | CniVerb::Del => None,
        CniVerb::Check => Some("0.4.0"),
        CniVerb::Gc | CniVerb::Status => Some("1.1.0"),
        CniVerb::Unknown | CniVerb::Version => return Err(call.unknown()),
    };
    let version = configured(conf)?;
    match since {
        Some(since) => check_verb(&call.command, since, version)?,
        None => check_supported(version)?,
    }
    Ok(version)
}

/// Refuses a text that is not exactly one of the supported CNI versions.
///
/// # Errors
/// CNI error code 1 for an unsupported CNI version.
fn check_supported(version: &str) -> Result<()> {
    if SUPPORTED_VERSIONS.contains(&version) {
        return Ok(());
    }
    let details = format!("config is {}, plugin supports {}", quoted(version), quoted_list(SUPPORTED_VERSIONS));
    Err(CniError::new(Code::IncompatibleVersion, "incompatible CNI versions").with_details(details))
}

/// Refuses a CNI verb that was added after the configuration's CNI version, and a CNI version that is newer than all
/// supported ones.
///
/// # Errors
/// CNI error code 1 for a CNI verb or a CNI version that is refused. CNI error code 6 for a malformed CNI version.
fn check_verb(verb: &str, since: &str, version: &str) -> Result<()> {
    let refused =
        |whose: &str| Err(CniError::new(Code::IncompatibleVersion, format!("{whose} version does not allow {verb}")));
    let configured = parse(version)?;
    if configured < parse(since)? {
        return refused("config");
    }
    if parse(NEWEST_VERSION)? < configured {
        return refused("plugin");
    }
    check_supported(version)
}

/// True if the CNI version `version` is older than `other`.
pub(crate) fn is_before(version: &str, other: &str) -> bool {
    matches!((parse(version), parse(other)), (Ok(a), Ok(b)) if a < b)
}

/// Parses a CNI version, which consists of up to three numbers with dots between them. Numbers that are missing at the
/// end of the CNI version count as 0.
fn parse(version: &str) -> Result<[i64; 3]> {
    let wrong = |message: String| CniError::new(Code::Decode, message);
    let mut numbers = [0; 3];
    let parts: Vec<_> = version.split('.').collect();
    if parts.len() > numbers.len() {
        return Err(wrong(format!("invalid version {}: too many parts", quoted(version))));
    }
    for ((number, part), name) in numbers.iter_mut().zip(parts).zip(["major", "minor", "micro"]) {
        *number = part.parse().map_err(|error: std::num::ParseIntError| {
            use std::num::IntErrorKind::{NegOverflow, PosOverflow};
            let reason = match error.kind() {
                PosOverflow | NegOverflow => "value out of range",
                _ => "invalid syntax",
            };
            let part = quoted(part);
            wrong(format!("failed to convert {name} version part {part}: strconv.Atoi: parsing {part}: {reason}"))
        })?;
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(verb: &str, since: &str, version: &str) -> String {
        let error = check_verb(verb, since, version).unwrap_err();
        format!("{} {}", error.code().number(), error.message())
    }

    #[test]
    fn version_reply_is_printed() {
        assert_eq!(
            version_reply(),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn version_of_configuration_is_read() {
        let of = |text: &str| configured(&GoJson::parse(text.as_bytes()).unwrap()).map(str::to_owned);
        for text in ["{}", r#"{"cniVersion":""}"#, r#"{"cniVersion":null}"#] {
            assert_eq!(of(text).unwrap(), "0.1.0");
        }
        assert_eq!(of(r#"{"CNIVERSION":"0.4.0"}"#).unwrap(), "0.4.0");
        assert_eq!(of(r#"{"cniVersion":1}"#).unwrap_err().code(), Code::Decode);
    }

    #[test]
    fn version_is_supported_only_as_exact_text() {
        for version in SUPPORTED_VERSIONS {
            check_supported(version).unwrap();
        }
        let error = check_supported("1.0").unwrap_err();
        assert_eq!(
            error.details(),
            r#"config is "1.0", plugin supports ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#
        );
    }

    #[test]
    fn version_gates_check_gc_and_status() {
        check_verb("CHECK", "0.4.0", "0.4.0").unwrap();
        check_verb("GC", "1.1.0", "1.1.0").unwrap();
        assert_eq!(refused("CHECK", "0.4.0", "0.3.1"), "1 config version does not allow CHECK");
        assert_eq!(refused("GC", "1.1.0", "1.0.0"), "1 config version does not allow GC");
        assert_eq!(refused("STATUS", "1.1.0", "2"), "1 plugin version does not allow STATUS");
        assert_eq!(refused("CHECK", "0.4.0", "0.5.0"), "1 incompatible CNI versions");
        assert_eq!(refused("GC", "1.1.0", "1.1.0.0"), "6 invalid version \"1.1.0.0\": too many parts");
        assert_eq!(
            refused("GC", "1.1.0", "1.x"),
            "6 failed to convert minor version part \"x\": strconv.Atoi: parsing \"x\": invalid syntax"
        );
        assert!(refused("GC", "1.1.0", "99999999999999999999").ends_with("value out of range"));
    }
}
