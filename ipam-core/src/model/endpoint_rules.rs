//! Calico's rules for a stored endpoint, and its words for an endpoint that breaks them.

use super::endpoint::{EndpointFacts, LABEL_NAMESPACE, LABEL_ORCHESTRATOR};
use super::workload::workload_endpoint_name;

/// The longest name of a document, in bytes.
const MAX_NAME: usize = 253;
/// The longest value of a label, and the longest name after its prefix, in bytes.
const MAX_LABEL: usize = 63;

const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const LABEL_NAME: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
    alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
    '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and \
    must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for \
    validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";

/// Checks what an endpoint of this name would store.
///
/// # Errors
/// Calico's text, which lists every field that it does not accept.
pub fn check_endpoint(name: &str, facts: &EndpointFacts) -> Result<(), String> {
    let mut wrong = Wrong::default();
    wrong.check_document_name(name);
    for (label, value) in &facts.labels {
        if label != LABEL_NAMESPACE && label != LABEL_ORCHESTRATOR {
            wrong.check_label(label, value);
        }
    }
    wrong.check_name("Node", &facts.node);
    if !facts.container.is_empty() && !is_label(&facts.container, |c| c.is_ascii_alphanumeric() || c == '-') {
        wrong.tagged("ContainerID", &facts.container, "containerID");
    }
    wrong.check_name("Pod", &facts.pod);
    wrong.check_name("Endpoint", &facts.endpoint);
    wrong.check_name("ServiceAccountName", &facts.service_account);
    for (index, profile) in facts.profiles.iter().enumerate() {
        wrong.check_name(&format!("Profiles[{index}]"), profile);
    }
    let interface = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if facts.interface.is_empty() || facts.interface.len() > 15 || !facts.interface.chars().all(interface) {
        wrong.tagged("InterfaceName", &facts.interface, "interface");
    }
    let inside = |(inner, outer): &(_, std::net::IpAddr)| {
        facts.addresses.contains(inner) && std::net::IpAddr::is_ipv4(inner) == outer.is_ipv4()
    };
    if !facts.nats.iter().all(inside) {
        let pairs: Vec<String> = facts.nats.iter().map(|(inner, outer)| format!("{{{inner} {outer}}}")).collect();
        wrong.field("IPNATs", &format!("[{}]", pairs.join(" ")), "NAT is not in the endpoint networks");
    }
    wrong.finish()
}

/// Fields that are not accepted, in the order of the document.
#[derive(Default)]
struct Wrong(Vec<String>);

impl Wrong {
    fn field(&mut self, field: &str, value: &str, reason: &str) {
        self.0.push(format!("{field} = '{value}' ({reason})"));
    }

    /// A value that does not fit the rule of this name.
    fn tagged(&mut self, field: &str, value: &str, tag: &str) {
        // The blank before the parenthesis is Calico's.
        self.field(field, value, &format!("Reason: failed to validate Field: {field} because of Tag: {tag} "));
    }

    fn check_document_name(&mut self, name: &str) {
        if name.len() > MAX_NAME {
            self.field("Metadata.Name", name, &format!("name is too long by {} bytes", name.len() - MAX_NAME));
        }
        if !is_subdomain(name) {
            let rule = "name must consist of lower case alphanumeric characters, '-' or '.'";
            self.field("Metadata.Name", name, &format!("{rule} (regex: {SUBDOMAIN})"));
        }
    }

    fn check_name(&mut self, field: &str, value: &str) {
        if !value.is_empty() && !is_subdomain(value) {
            self.tagged(field, value, "name");
        }
    }

    fn check_label(&mut self, label: &str, value: &str) {
        let (prefix, name) = label.split_once('/').map_or((None, label), |(prefix, name)| (Some(prefix), name));
        let mut wrong = |reason: String| self.field("Metadata.Labels (label)", label, &reason);
        if prefix.is_some_and(|prefix| !is_subdomain(prefix)) {
            wrong("prefix part must be a lowercase RFC 1123 subdomain".to_owned());
        }
        if name.is_empty() {
            wrong("name part must be non-empty".to_owned());
        } else if name.len() > MAX_LABEL {
            wrong(format!("name part must be no more than {MAX_LABEL} bytes"));
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !is_label(name, allowed) {
            wrong(format!("name part {LABEL_NAME}"));
        }
        if value.len() > MAX_LABEL {
            self.field("Metadata.Labels (value)", value, &format!("must be no more than {MAX_LABEL} bytes"));
        }
        if !value.is_empty() && !is_label(value, allowed) {
            self.field("Metadata.Labels (value)", value, LABEL_VALUE);
        }
    }

    fn finish(self) -> Result<(), String> {
        match self.0.as_slice() {
            [] => Ok(()),
            [one] => Err(format!("error with field {one}")),
            several => {
                let lines: String = several.iter().map(|field| format!("-  {field}\n")).collect();
                Err(format!("error with the following fields:\n{lines}"))
            }
        }
    }
}

/// True for allowed characters between two letters or digits.
fn is_label(text: &str, allowed: impl Fn(char) -> bool) -> bool {
    text.chars().all(allowed)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

fn is_subdomain(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    text.split('.').all(|part| is_label(part, allowed))
}

/// The parts of an endpoint's name: node, orchestrator, container id or pod, interface. Single dashes stand between the
/// parts; a double dash is a dash inside of a part.
pub fn split_endpoint_name(name: &str) -> Option<[String; 4]> {
    let mut parts = vec![String::new()];
    let mut chars = name.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '-' {
            parts.last_mut()?.push(c);
        } else if chars.next_if_eq(&'-').is_some() {
            parts.last_mut()?.push('-');
        } else {
            parts.push(String::new());
        }
    }
    parts.try_into().ok()
}

/// The name of the same endpoint on another node; `None` if the name has no four parts, or the node's name cannot be one.
pub fn endpoint_name_on(name: &str, node: &str) -> Option<String> {
    let [_, orchestrator, workload, endpoint] = split_endpoint_name(name)?;
    let parts = [("node", node), ("orchestrator", &orchestrator), ("workload", &workload), ("endpoint", &endpoint)];
    workload_endpoint_name(&parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::endpoint::Orchestrator;
    use crate::model::resource::Labels;

    fn facts() -> EndpointFacts {
        EndpointFacts {
            node: "node1".into(),
            orchestrator: Orchestrator::Cni,
            container: "c1".into(),
            pod: String::new(),
            endpoint: "eth0".into(),
            service_account: String::new(),
            generate_name: String::new(),
            labels: Labels::new(),
            addresses: vec!["10.65.166.128".parse().unwrap()],
            nats: Vec::new(),
            profiles: vec!["net1".into()],
            interface: "calic1".into(),
            mac: String::new(),
            ports: Vec::new(),
            allowed_sources: Vec::new(),
        }
    }

    fn error(name: &str, facts: &EndpointFacts) -> String {
        check_endpoint(name, facts).unwrap_err()
    }

    #[test]
    fn calicos_words() {
        check_endpoint("node1-cni-c1-eth0", &facts()).unwrap();
        let subdomain = "name must consist of lower case alphanumeric characters, '-' or '.' (regex: [a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*)";
        let upper = EndpointFacts { node: "Old-Name".into(), ..facts() };
        assert_eq!(
            error("Old--Name-cni-c4-eth0", &upper),
            format!(
                "error with the following fields:\n-  Metadata.Name = 'Old--Name-cni-c4-eth0' ({subdomain})\n-  Node = 'Old-Name' (Reason: failed to validate Field: Node because of Tag: name )\n"
            )
        );
        let dot = EndpointFacts { container: "with.dot".into(), ..facts() };
        assert_eq!(
            error("node1-cni-with.dot-eth0", &dot),
            "error with field ContainerID = 'with.dot' (Reason: failed to validate Field: ContainerID because of Tag: containerID )"
        );
        let profile = EndpointFacts { profiles: vec!["Net_1.x".into()], ..facts() };
        assert_eq!(
            error("n-cni-c-e", &profile),
            "error with field Profiles[0] = 'Net_1.x' (Reason: failed to validate Field: Profiles[0] because of Tag: name )"
        );
        let long = "a".repeat(254);
        assert_eq!(
            error(&long, &facts()),
            format!("error with field Metadata.Name = '{long}' (name is too long by 1 bytes)")
        );
    }

    #[test]
    fn labels_are_kuberneteses() {
        let with = |name: &str, value: &str| EndpointFacts { labels: [(name.into(), value.into())].into(), ..facts() };
        check_endpoint("n", &with("a.b/c", "")).unwrap();
        let long = "x".repeat(64);
        assert_eq!(
            error("n", &with("a", &long)),
            format!("error with field Metadata.Labels (value) = '{long}' (must be no more than 63 bytes)")
        );
        let empty = error("n", &with("", "x"));
        assert!(empty.contains("-  Metadata.Labels (label) = '' (name part must be non-empty)\n"), "{empty}");
        assert!(empty.contains("(e.g. 'MyName',  or 'my.name',  or '123-abc', regex"), "{empty}");
    }

    #[test]
    fn floating_addresses_belong_to_the_endpoint() {
        let ip = |text: &str| text.parse().unwrap();
        let with = |inner, outer| EndpointFacts { nats: vec![(ip(inner), ip(outer))], ..facts() };
        check_endpoint("n", &with("10.65.166.128", "10.65.200.1")).unwrap();
        assert_eq!(
            error("n", &with("10.65.166.129", "10.65.200.1")),
            "error with field IPNATs = '[{10.65.166.129 10.65.200.1}]' (NAT is not in the endpoint networks)"
        );
        assert!(check_endpoint("n", &with("10.65.166.128", "fd80::1")).is_err());
    }

    #[test]
    fn names_are_split_at_single_dashes() {
        let parts = split_endpoint_name("named--host-cni-a--b-eth0").unwrap();
        assert_eq!(parts, ["named-host", "cni", "a-b", "eth0"]);
        for name in ["a-b-c", "a-b-c-d-e", ""] {
            assert_eq!(split_endpoint_name(name), None, "{name}");
        }
    }
}
