//! A runtime's list of its containers or attachments, in the forms that runtimes print. The content shows the form.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ipam_core::gc::{Listed, RuntimeList};
use serde_json::Value;

use super::list::{List, folder};
use crate::cni::is_cni_name;
use crate::error::Result;
use crate::output::printable;

/// The member of a network configuration in which CNI lists attachments.
const CNI: &str = "cni.dev/valid-attachments";
/// The name that CNI's specification once had for it: libcni writes both.
const CNI_BEFORE: &str = "cni.dev/attachments";
/// libcni's name for its record of an attachment.
const CACHED: &str = "cniCacheV1";
/// The accepted forms.
const EXPECTED: &str = "give the array of cni.dev/valid-attachments, what crictl pods -o json or podman ps -a --format json \
                        prints, a container's id in each line, or the folder /var/lib/cni/results";

/// The contents of a list, and the network if it is about only one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Parsed {
    network: Option<String>,
    listed: Vec<Listed>,
}

/// Reads lists. An empty one is refused unless it `may_be_empty`.
///
/// # Errors
/// A file cannot be read, or is no such list; the error names the place.
pub(super) fn read(paths: &[PathBuf], may_be_empty: bool) -> Result<Vec<RuntimeList>> {
    paths.iter().map(|path| if path.is_dir() { cache(path, may_be_empty) } else { file(path, may_be_empty) }).collect()
}

fn file(path: &Path, may_be_empty: bool) -> Result<RuntimeList> {
    let list = List::read(path)?;
    let Parsed { network, listed } = parse(&list.text).map_err(|what| list.wrong(&what, EXPECTED))?;
    list.unless_empty(listed.is_empty(), may_be_empty)?;
    let read = RuntimeList::new(list.made.into(), listed);
    Ok(match network {
        Some(network) => read.only_for(network),
        None => read,
    })
}

/// The folder in which libcni keeps a file for each attachment.
fn cache(path: &Path, may_be_empty: bool) -> Result<RuntimeList> {
    let made = SystemTime::now();
    let files = folder(path)?;
    let attachment = |file: &List| {
        let value = serde_json::from_str(&file.text).map_err(|error| format!("it is no JSON: {error}"));
        let listed = value.and_then(|value| cached(&value));
        listed.map_err(|what| {
            file.wrong(&what, "every file in the folder has to be one that libcni keeps of an attachment")
        })
    };
    let listed: Vec<Listed> = files.iter().map(attachment).collect::<Result<_>>()?;
    let all = List { name: printable(&path.display().to_string()), text: String::new(), made };
    all.unless_empty(listed.is_empty(), may_be_empty)?;
    Ok(RuntimeList::new(made.into(), listed))
}

fn parse(text: &str) -> Result<Parsed, String> {
    match text.trim_start().chars().next() {
        Some('{' | '[') => json(text),
        _ => Ok(Parsed { network: None, listed: lines(text)? }),
    }
}

fn lines(text: &str) -> Result<Vec<Listed>, String> {
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    lines.map(|(number, line)| container(line).map_err(|what| format!("line {}: {what}", number + 1))).collect()
}

/// A container of which only the id is known.
fn container(id: &str) -> Result<Listed, String> {
    match is_cni_name(id) {
        true => Ok(Listed { container: id.to_owned(), ..Listed::default() }),
        false => Err(format!("{:?} is no container's id", printable(&id.chars().take(60).collect::<String>()))),
    }
}

fn json(text: &str) -> Result<Parsed, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
    if let Some(elements) = value.as_array() {
        return Ok(Parsed { network: None, listed: each(elements, element)? });
    }
    let named =
        [CNI, CNI_BEFORE].into_iter().find_map(|name| Some((name, value.get(name).filter(|one| !one.is_null())?)));
    if let Some((name, listed)) = named {
        let elements = listed.as_array().ok_or_else(|| format!("{name} is no array"))?;
        let network = value.get("name").and_then(Value::as_str).map(str::to_owned);
        return Ok(Parsed { network, listed: each(elements, attachment)? });
    }
    if let Some(pods) = value.get("items").and_then(Value::as_array) {
        let pod = |pod: &Value| container(text_of(pod, "id")?);
        return Ok(Parsed { network: None, listed: each(pods, pod)? });
    }
    match value.get("containers") {
        Some(_) => Err("it lists containers, and networks belong to pods: crictl pods -o json lists those".to_owned()),
        None => Err(format!("it has neither {CNI} nor items")),
    }
}

fn each(elements: &[Value], read: impl Fn(&Value) -> Result<Listed, String>) -> Result<Vec<Listed>, String> {
    let numbered = elements.iter().enumerate();
    numbered.map(|(number, one)| read(one).map_err(|what| format!("element {}: {what}", number + 1))).collect()
}

/// An element of an array: CNI's, or podman's.
fn element(value: &Value) -> Result<Listed, String> {
    match value.get("Id") {
        Some(_) => container(text_of(value, "Id")?),
        None => attachment(value),
    }
}

fn attachment(value: &Value) -> Result<Listed, String> {
    let network = match value.get("network") {
        Some(_) => Some(text_of(value, "network")?.to_owned()),
        None => None,
    };
    let named = container(text_of(value, "containerID")?)?;
    Ok(Listed { interface: Some(text_of(value, "ifname")?.to_owned()), network, ..named })
}

fn cached(value: &Value) -> Result<Listed, String> {
    if value.get("kind").and_then(Value::as_str) != Some(CACHED) {
        return Err(format!("its kind is not {CACHED}"));
    }
    let named = container(text_of(value, "containerId")?)?;
    let [interface, network] = ["ifName", "networkName"].map(|name| text_of(value, name).map(str::to_owned));
    Ok(Listed { interface: Some(interface?), network: Some(network?), ..named })
}

/// A member that must be a text.
fn text_of<'v>(value: &'v Value, name: &str) -> Result<&'v str, String> {
    let text = value.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    text.ok_or_else(|| format!("it has no text {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9";

    fn one(container: &str, interface: Option<&str>, network: Option<&str>) -> Listed {
        let text = |text: &str| text.to_owned();
        Listed { container: text(container), interface: interface.map(text), network: network.map(text) }
    }

    #[test]
    fn every_form_is_told_by_what_it_is() {
        let all = |text: &str| parse(text).unwrap();
        assert_eq!(all(&format!("\n{ID}\r\n  web-1 \n")).listed, [one(ID, None, None), one("web-1", None, None)]);
        let array = r#" [{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"e1","network":"n"}]"#;
        assert_eq!(all(array).listed, [one("a", Some("eth0"), None), one("b", Some("e1"), Some("n"))]);
        let conf =
            r#"{"name":"lab","type":"bridge","cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]}"#;
        assert_eq!((all(conf).network.as_deref(), all(conf).listed.len()), (Some("lab"), 1));
        let crictl = format!(r#"{{"items":[{{"id":"{ID}","metadata":{{"name":"web"}},"state":"SANDBOX_READY"}}]}}"#);
        assert_eq!(all(&crictl).listed, [one(ID, None, None)]);
        let podman = format!(r#"[{{"AutoRemove":false,"Id":"{ID}","Names":["web"]}}]"#);
        assert_eq!(all(&podman).listed, [one(ID, None, None)]);
        let cni =
            [r#"{"cni.dev/valid-attachments":[]}"#, r#"{"cni.dev/valid-attachments":null,"cni.dev/attachments":[]}"#];
        for empty in ["", " \n", "[]", r#"{"items":[]}"#, cni[0], cni[1], r#"{"cni.dev/attachments":[]}"#] {
            assert_eq!(all(empty).listed, [], "{empty}");
        }
    }

    #[test]
    fn what_is_no_such_list_says_where() {
        for (text, words) in [
            ("CONTAINER ID   IMAGE\nabc  x", "line 1: \"CONTAINER ID   IMAGE\" is no container's id"),
            ("abc\n\n-x\n", "line 3: \"-x\" is no container's id"),
            ("a\u{1b}[2J", "is no container's id"),
            ("[1]", "element 1: it has no text containerID"),
            (r#"[{"containerID":"a"}]"#, "element 1: it has no text ifname"),
            (r#"[{"Id":"a"},{"Id":7}]"#, "element 2: it has no text Id"),
            (r#"{"items":[{"metadata":{"name":"node1"}}]}"#, "element 1: it has no text id"),
            (r#"{"containers":[]}"#, "crictl pods -o json lists those"),
            (r#"{"cni.dev/valid-attachments":{}}"#, "is no array"),
            (r#"{"cni.dev/attachments":1}"#, "cni.dev/attachments is no array"),
            ("{}", "it has neither"),
            ("[{", "it is no JSON"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let result = r#"{"cniVersion":"1.0.0","ips":[]}"#;
        assert!(cached(&serde_json::from_str(result).unwrap()).unwrap_err().contains("cniCacheV1"));
    }

    #[test]
    fn libcnis_own_form() {
        let text = format!(
            r#"{{"kind":"cniCacheV1","containerId":"{ID}","config":"e30=","ifName":"eth0","networkName":"lab","result":{{}}}}"#
        );
        let value = serde_json::from_str(&text).unwrap();
        assert_eq!(cached(&value), Ok(one(ID, Some("eth0"), Some("lab"))));
    }
}
