//! Reads lists of attachments or nodes, which other programs write, from a file, a folder or standard input, for
//! `margay gc`. A list of attachments names the containers or attachments of a container runtime, in the runtime's own
//! format. The format of a list is recognised by its content. A list of nodes names the existing nodes, either as
//! `kubectl` prints them or one name per line.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use datastore::{TextFault, text_fault};
use ipam_core::gc::{ListedAttachment, RuntimeList};
use serde_json::Value;

use crate::cni::is_cni_name;
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;

/// Maximum size in bytes of a list of attachments or nodes.
const MAX_LIST_BYTES: u64 = 64 << 20;

/// The text of a list of attachments or nodes, and the time when the list was made.
struct ListInput {
    /// The list's name in error messages.
    name: String,
    text: String,
    /// The latest time at which the list can have been made; for a file, its modification time.
    made: SystemTime,
}

impl ListInput {
    /// Reads a list from a file, or from standard input if the path is `-`.
    ///
    /// # Errors
    /// The file cannot be read, is not UTF-8 text, or is longer than [`MAX_LIST_BYTES`].
    fn read(path: &Path) -> CommandResult<Self> {
        let now = SystemTime::now();
        if path.as_os_str() == "-" {
            let text = read_text(io::stdin().lock()).map_err(|error| cannot_read("standard input", &error))?;
            return Ok(Self { name: "the list on standard input".to_owned(), text, made: now });
        }
        let read = || {
            let file = File::open(path)?;
            // If the file's modification time is in the future, the list counts as made now.
            let made = file.metadata()?.modified()?.min(now);
            Ok((read_text(file)?, made))
        };
        let (text, made) = read().map_err(|error| cannot_read(&path.display().to_string(), &error))?;
        Ok(Self { name: printable(&path.display().to_string()), text, made })
    }

    /// Builds the error for a malformed list from a description of the mistake and a hint about the expected content.
    fn wrong(&self, what: &str, expected: &str) -> CommandFailure {
        CommandFailure::new(format!("nothing was freed: {}: {what}", self.name)).hint(expected)
    }

    /// Refuses an empty list of attachments or nodes, unless `is_meant` says that the user expects the list to be
    /// empty.
    ///
    /// # Errors
    /// The list of attachments or nodes is empty, although the user does not expect an empty list.
    fn require_not_empty(&self, is_empty: bool, is_meant: bool) -> CommandResult<()> {
        match is_empty && !is_meant {
            true => Err(self.wrong("it is empty", "add --empty if the list is meant to be empty")),
            false => Ok(()),
        }
    }
}

/// Reads the files of a folder, in the order of their names. Skips files that are deleted while the folder is read.
///
/// # Errors
/// A path in the folder cannot be read, or is not a regular file.
fn read_folder(path: &Path) -> CommandResult<Vec<ListInput>> {
    let failed = |path: &Path, error: &io::Error| cannot_read(&path.display().to_string(), error);
    let entries = fs::read_dir(path)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<PathBuf>>>());
    let mut paths = entries.map_err(|error| failed(path, &error))?;
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        match File::open(&path).and_then(read_text) {
            Ok(text) => {
                files.push(ListInput { name: printable(&path.display().to_string()), text, made: SystemTime::now() });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&path, &error)),
        }
    }
    Ok(files)
}

fn cannot_read(name: &str, error: &io::Error) -> CommandFailure {
    CommandFailure::new(format!("nothing was freed: cannot read {}: {error}", printable(name)))
}

fn read_text(from: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_LIST_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_LIST_BYTES {
        return Err(io::Error::other("it is longer than any list"));
    }
    // An empty list is no error here, because the caller reports an empty list with its own error message. A list with
    // a byte order mark is refused: if the mark became a part of the first name in the list, gc would free the
    // addresses of the container with that name.
    match text_fault(&bytes).filter(|fault| *fault != TextFault::Empty) {
        None => String::from_utf8(bytes).map_err(io::Error::other),
        Some(fault) => Err(io::Error::other(fault.to_string())),
    }
}

/// The field of a network configuration in which a container runtime passes the valid attachments to a CNI plugin.
const CNI_MEMBER: &str = "cni.dev/valid-attachments";
/// The former name of the field `cni.dev/valid-attachments`. libcni writes both `cni.dev/attachments` and
/// `cni.dev/valid-attachments`.
const CNI_FORMER_MEMBER: &str = "cni.dev/attachments";
/// The value of the field `kind` in the files in which libcni records attachments.
const CNI_CACHE_KIND: &str = "cniCacheV1";
const EXPECTED_ATTACHMENTS: &str = "pass the output of crictl pods -o json or podman ps -a --format json, the array \
                        of cni.dev/valid-attachments, one container ID per line, or the folder /var/lib/cni/results";

/// A parsed list of attachments, and the network of these attachments if all of them are in one network.
#[derive(Debug, Default, PartialEq, Eq)]
struct ParsedList {
    network: Option<String>,
    listed: Vec<ListedAttachment>,
}

/// Reads lists of attachments. Refuses an empty list of attachments unless `may_be_empty` is true.
///
/// # Errors
/// A file cannot be read, or has none of the accepted list formats. The error message names the file and the faulty
/// list element.
pub(super) fn read_attachments(paths: &[PathBuf], may_be_empty: bool) -> CommandResult<Vec<RuntimeList>> {
    paths
        .iter()
        .map(|path| if path.is_dir() { read_cache(path, may_be_empty) } else { read_file(path, may_be_empty) })
        .collect()
}

fn read_file(path: &Path, may_be_empty: bool) -> CommandResult<RuntimeList> {
    let list = ListInput::read(path)?;
    let ParsedList { network, listed } =
        parse_attachments(&list.text).map_err(|what| list.wrong(&what, EXPECTED_ATTACHMENTS))?;
    list.require_not_empty(listed.is_empty(), may_be_empty)?;
    let read = RuntimeList::new(list.made.into(), listed);
    Ok(match network {
        Some(network) => read.only_for(network),
        None => read,
    })
}

/// Reads the folder in which libcni keeps a file for each attachment.
fn read_cache(path: &Path, may_be_empty: bool) -> CommandResult<RuntimeList> {
    let made = SystemTime::now();
    let files = read_folder(path)?;
    let attachment = |file: &ListInput| {
        let value = serde_json::from_str(&file.text).map_err(|error| format!("it is no JSON: {error}"));
        let listed = value.and_then(|value| parse_cached(&value));
        listed.map_err(|what| {
            file.wrong(&what, "name a folder in which libcni wrote every file, such as /var/lib/cni/results")
        })
    };
    let listed: Vec<ListedAttachment> = files.iter().map(attachment).collect::<CommandResult<_>>()?;
    let all = ListInput { name: printable(&path.display().to_string()), text: String::new(), made };
    all.require_not_empty(listed.is_empty(), may_be_empty)?;
    Ok(RuntimeList::new(made.into(), listed))
}

fn parse_attachments(text: &str) -> Result<ParsedList, String> {
    match text.trim_start().chars().next() {
        Some('{' | '[') => parse_json(text),
        _ => Ok(ParsedList { network: None, listed: parse_lines(text)? }),
    }
}

fn parse_lines(text: &str) -> Result<Vec<ListedAttachment>, String> {
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    lines.map(|(number, line)| parse_container(line).map_err(|what| format!("line {}: {what}", number + 1))).collect()
}

/// Parses a container id as an attachment whose network and interface are unknown.
fn parse_container(id: &str) -> Result<ListedAttachment, String> {
    match is_cni_name(id) {
        true => Ok(ListedAttachment { container: id.to_owned(), ..ListedAttachment::default() }),
        false => Err(format!("{:?} is no container's id", printable(&id.chars().take(60).collect::<String>()))),
    }
}

fn parse_json(text: &str) -> Result<ParsedList, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
    if let Some(elements) = value.as_array() {
        return Ok(ParsedList { network: None, listed: each(elements, parse_element)? });
    }
    let named = [CNI_MEMBER, CNI_FORMER_MEMBER]
        .into_iter()
        .find_map(|name| Some((name, value.get(name).filter(|one| !one.is_null())?)));
    if let Some((name, listed)) = named {
        let elements = listed.as_array().ok_or_else(|| format!("{name} is no array"))?;
        let network = value.get("name").and_then(Value::as_str).map(str::to_owned);
        return Ok(ParsedList { network, listed: each(elements, parse_attachment)? });
    }
    if let Some(pods) = value.get("items").and_then(Value::as_array) {
        let pod = |pod: &Value| parse_container(text_of(pod, "id")?);
        return Ok(ParsedList { network: None, listed: each(pods, pod)? });
    }
    match value.get("containers") {
        Some(_) => Err("it lists containers, and networks belong to pods: crictl pods -o json lists those".to_owned()),
        None => Err(format!("it has neither {CNI_MEMBER} nor items")),
    }
}

fn each(
    elements: &[Value],
    read: impl Fn(&Value) -> Result<ListedAttachment, String>,
) -> Result<Vec<ListedAttachment>, String> {
    let numbered = elements.iter().enumerate();
    numbered.map(|(number, one)| read(one).map_err(|what| format!("element {}: {what}", number + 1))).collect()
}

/// Parses an element of a JSON array of attachments, in CNI's or podman's format.
fn parse_element(value: &Value) -> Result<ListedAttachment, String> {
    match value.get("Id") {
        Some(_) => parse_container(text_of(value, "Id")?),
        None => parse_attachment(value),
    }
}

fn parse_attachment(value: &Value) -> Result<ListedAttachment, String> {
    let network = match value.get("network") {
        Some(_) => Some(text_of(value, "network")?.to_owned()),
        None => None,
    };
    let named = parse_container(text_of(value, "containerID")?)?;
    Ok(ListedAttachment { interface: Some(text_of(value, "ifname")?.to_owned()), network, ..named })
}

fn parse_cached(value: &Value) -> Result<ListedAttachment, String> {
    if value.get("kind").and_then(Value::as_str) != Some(CNI_CACHE_KIND) {
        return Err(format!("its kind is not {CNI_CACHE_KIND}"));
    }
    let named = parse_container(text_of(value, "containerId")?)?;
    let [interface, network] = ["ifName", "networkName"].map(|name| text_of(value, name).map(str::to_owned));
    Ok(ListedAttachment { interface: Some(interface?), network: Some(network?), ..named })
}

/// Returns the field `name` of a JSON object, which must be a string.
fn text_of<'v>(value: &'v Value, name: &str) -> Result<&'v str, String> {
    let text = value.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    text.ok_or_else(|| format!("it has no text {name}"))
}

const EXPECTED_NODES: &str = "pass the output of kubectl get nodes -o name or -o json, or one node name per line";

/// Reads a list of node names. Refuses an empty list of node names unless `may_be_empty` is true.
///
/// # Errors
/// The file cannot be read, or has none of the accepted list formats. The error message names the file and the faulty
/// list element.
pub(super) fn read_nodes(path: &Path, may_be_empty: bool) -> CommandResult<BTreeSet<String>> {
    let list = ListInput::read(path)?;
    let nodes = parse_nodes(&list.text).map_err(|what| list.wrong(&what, EXPECTED_NODES))?;
    list.require_not_empty(nodes.is_empty(), may_be_empty)?;
    Ok(nodes)
}

fn parse_nodes(text: &str) -> Result<BTreeSet<String>, String> {
    if text.trim_start().starts_with(['{', '[']) {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("it is no JSON: {error}"))?;
        let items = match value.get("items") {
            Some(items) => items.as_array().ok_or("its items are no array")?.clone(),
            None => vec![value],
        };
        let numbered = items.iter().enumerate();
        return numbered.map(|(number, one)| node_name(one).ok_or_else(|| not_a_node(number + 1))).collect();
    }
    let lines = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty());
    let name = |(number, line): (usize, &str)| {
        let name = line.strip_prefix("node/").unwrap_or(line);
        let is_name = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/');
        let shown = || printable(&line.chars().take(60).collect::<String>());
        if is_name { Ok(name.to_owned()) } else { Err(format!("line {}: {:?} is no node's name", number + 1, shown())) }
    };
    lines.map(name).collect()
}

/// Returns the name of a Kubernetes node, or `None` if the JSON value is not a node.
fn node_name(value: &Value) -> Option<String> {
    let is_node = value.get("kind").is_none_or(|kind| kind == "Node");
    let name = value.pointer("/metadata/name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.filter(|_| is_node).map(str::to_owned)
}

fn not_a_node(number: usize) -> String {
    format!("element {number} is no node")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9";

    fn one(container: &str, interface: Option<&str>, network: Option<&str>) -> ListedAttachment {
        let text = |text: &str| text.to_owned();
        ListedAttachment { container: text(container), interface: interface.map(text), network: network.map(text) }
    }

    #[test]
    fn attachment_list_form_is_recognized_by_content() {
        let all = |text: &str| parse_attachments(text).unwrap();
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
    fn attachment_list_error_says_where_when_malformed() {
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
            let error = parse_attachments(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let result = r#"{"cniVersion":"1.0.0","ips":[]}"#;
        assert!(parse_cached(&serde_json::from_str(result).unwrap()).unwrap_err().contains("cniCacheV1"));
    }

    #[test]
    fn attachment_list_takes_libcni_form() {
        let text = format!(
            r#"{{"kind":"cniCacheV1","containerId":"{ID}","config":"e30=","ifName":"eth0","networkName":"lab","result":{{}}}}"#
        );
        let value = serde_json::from_str(&text).unwrap();
        assert_eq!(parse_cached(&value), Ok(one(ID, Some("eth0"), Some("lab"))));
    }

    #[test]
    fn node_list_takes_names_in_every_form() {
        let list = r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Node","metadata":{"name":"a"}},
            {"kind":"Node","metadata":{"name":"b.example.org"}}]}"#;
        let names = |text: &str| parse_nodes(text).unwrap().into_iter().collect::<Vec<_>>();
        assert_eq!(names(list), ["a", "b.example.org"]);
        assert_eq!(names("node/a\nnode/b\n"), ["a", "b"]);
        assert_eq!(names("\n a \r\nb"), ["a", "b"]);
        assert_eq!(names(r#"{"kind":"Node","metadata":{"name":"a"}}"#), ["a"]);
        assert!(names(r#"{"items":[]}"#).is_empty() && names("").is_empty());
    }

    #[test]
    fn node_list_is_refused_when_not_text() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (content, words) in [
            (&b"\xef\xbb\xbfnode1\nnode2\n"[..], "it begins with a byte order mark"),
            (b"\xff\xfen\0o\0", "it begins with a byte order mark"),
            (b"\0\0\0\0", "it holds nothing but zero bytes"),
            (b"node1\n\xff\n", "it is not UTF-8"),
            (b"", "it is empty"),
        ] {
            fs::write(file.path(), content).unwrap();
            let error = format!("{:?}", read_nodes(file.path(), false).unwrap_err());
            assert!(error.contains(words) && error.contains("nothing was freed"), "{content:?}: {error}");
        }
        fs::write(file.path(), "").unwrap();
        assert!(read_nodes(file.path(), true).unwrap().is_empty());
    }

    #[test]
    fn node_list_error_says_where_when_malformed() {
        for (text, words) in [
            ("NAME  STATUS\na  Ready", "line 1: \"NAME  STATUS\" is no node's name"),
            ("a\npod/b", "line 2: \"pod/b\" is no node's name"),
            (r#"{"items":[{"kind":"Pod","metadata":{"name":"a"}}]}"#, "element 1 is no node"),
            (r#"{"items":[{"id":"a"}]}"#, "element 1 is no node"),
            ("[{}", "it is no JSON"),
            (r#"{"items":1}"#, "no array"),
        ] {
            let error = parse_nodes(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
