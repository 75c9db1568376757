//! GC: the attachments that a runtime reports, and the release of all others.
//!
//! The specification makes the runtime's list the authority: an attachment that is not in it is gone. So an address is
//! released here even if an interface somewhere still has it, such as that of a container that could not be taken
//! apart. The operator's `margay gc` goes by the evidence of the machine instead.

use std::collections::BTreeSet;

use agent::{Allocator, CniError, Collected, Gc, Result};

use crate::gojson::Json;
use crate::identity::no_node_error;
use crate::run::Context;

/// The configuration's member with the list, and the name that CNI's specification once had for it: libcni writes both.
const MEMBERS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// The container ids and interfaces that are in use, by the runtime's account.
///
/// # Errors
/// Code 7 if there is no list, or an element is no attachment: then nothing may be released.
pub(crate) fn valid_attachments(json: &Json) -> Result<BTreeSet<(String, String)>> {
    let member = MEMBERS.into_iter().find(|name| json.member(name).is_some()).unwrap_or(MEMBERS[0]);
    let Some(Json::Array(elements)) = json.member(member) else {
        return Err(CniError::config(format!("GC needs a list in {member}, nothing was released"))
            .with_details("an empty list means that no attachment is in use"));
    };
    let attachment = |element: &Json| {
        let text = |name: &str| element.text_member(name).ok().filter(|text| !text.is_empty()).map(str::to_owned);
        Some((text("containerID")?, text("ifname")?))
    };
    let valid = elements.iter().map(attachment).collect::<Option<BTreeSet<_>>>();
    valid.ok_or_else(|| {
        CniError::config(format!("{member} has an element that is no attachment, nothing was released"))
            .with_details("every element needs the texts containerID and ifname")
    })
}

impl Context<'_> {
    /// Releases the addresses of attachments that the runtime does not know any more.
    pub(crate) fn gc(&self, valid: BTreeSet<(String, String)>, allocator: &dyn Allocator) -> Result<()> {
        let node = self.host.node(&self.conf);
        if node.is_empty() {
            return Err(no_node_error());
        }
        let now = self.host.now.unix_timestamp_nanos();
        let gc = Gc { network: self.conf.name.clone(), node, valid, now };
        log(&allocator.gc(&self.store, gc)?, &self.conf.name);
        Ok(())
    }
}

/// Logs what was released and what was not.
fn log(collected: &Collected, network: &str) {
    let Collected { released, changed, young, undated, unmarked } = collected;
    tracing::info!(network, ?released, changed, young, unmarked, "nothing is held any more by what is gone");
    if *undated > 0 {
        tracing::warn!(
            network,
            undated,
            "left what has no readable time; margay gc --netns frees it without its network namespace"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<BTreeSet<(String, String)>> {
        valid_attachments(&Json::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn a_list_is_read_and_an_empty_one_is_a_list() {
        let text =
            r#"{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"a","ifname":"e1"}]}"#;
        let expected = [("a", "e1"), ("a", "eth0")].map(|(id, name)| (id.to_owned(), name.to_owned()));
        assert_eq!(read(text).unwrap(), expected.into());
        assert_eq!(read(r#"{"cni.dev/valid-attachments":[]}"#).unwrap(), BTreeSet::new());
        let one = BTreeSet::from([("b".to_owned(), "eth0".to_owned())]);
        let other = r#""cni.dev/attachments":[{"containerID":"b","ifname":"eth0"}]"#;
        assert_eq!(read(&format!("{{{other}}}")).unwrap(), one);
        assert_eq!(read(&format!(r#"{{"cni.dev/valid-attachments":null,{other}}}"#)).unwrap(), one);
        assert_eq!(read(&format!(r#"{{"cni.dev/valid-attachments":[],{other}}}"#)).unwrap(), BTreeSet::new());
    }

    #[test]
    fn what_is_no_list_of_attachments_is_refused() {
        for list in [
            "{}",
            "null",
            "\"a\"",
            "{\"containerID\":\"a\",\"ifname\":\"b\"}",
            "[1]",
            "[{\"containerID\":\"a\"}]",
            "[{\"containerID\":\"\",\"ifname\":\"b\"}]",
            "[{\"containerID\":\"a\",\"ifname\":1}]",
            "[null]",
        ] {
            let error = read(&format!(r#"{{"cni.dev/valid-attachments":{list}}}"#)).unwrap_err();
            assert_eq!(error.code().number(), 7, "{list}");
            assert!(error.message().contains("nothing was released") && !error.details().is_empty(), "{list}");
        }
        let both = r#"{"cni.dev/valid-attachments":"a","cni.dev/attachments":[]}"#;
        assert_eq!(read(both).unwrap_err().code().number(), 7, "the other list counts only where this one is missing");
        let error = read(r#"{"cni.dev/attachments":[1]}"#).unwrap_err();
        assert!(error.message().starts_with("cni.dev/attachments has an element"), "{}", error.message());
    }
}
