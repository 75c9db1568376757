//! How the name of a container becomes the names in the store.

/// The handle of a container on a network: `<network>.<container id>`. It can not be taken apart again, since both
/// halves may hold dots.
pub fn handle_id(network: &str, container: &str) -> String {
    format!("{network}.{container}")
}

/// True if a stored handle is this one. Of both only the part before the first carriage return counts: an old
/// migration stored file contents with their line end.
pub fn same_handle(stored: &str, handle: &str) -> bool {
    stored.split('\r').next() == handle.split('\r').next()
}

/// A container whose name cannot be part of a workload endpoint's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("error constructing WorkloadEndpoint name: error with field {field} = '{value}' ({reason})")]
pub struct InvalidWorkload {
    field: &'static str,
    value: String,
    reason: &'static str,
}

/// Calico's name of a workload's endpoint: the parts joined by `-`, each `-` inside a part doubled.
///
/// `parts` are pairs of the field's name, as an error shows it, and its value: node, `k8s` or `cni`, pod or container
/// id, interface.
///
/// # Errors
/// [`InvalidWorkload`] for the first part that is empty or that begins or ends with `-`.
pub fn workload_endpoint_name(parts: &[(&'static str, &str)]) -> Result<String, InvalidWorkload> {
    let mut name = Vec::with_capacity(parts.len());
    for (field, value) in parts {
        let reason = if value.is_empty() {
            "field should be assigned"
        } else if value.starts_with('-') {
            "field must not begin with a '-'"
        } else if value.ends_with('-') {
            "field must not end with a '-'"
        } else {
            name.push(value.replace('-', "--"));
            continue;
        };
        return Err(InvalidWorkload { field, value: (*value).to_owned(), reason });
    }
    Ok(name.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_compare_up_to_the_carriage_return() {
        assert_eq!(handle_id("net1", "c1"), "net1.c1");
        assert!(same_handle("net1.c1\r\neth0", "net1.c1"));
        assert!(!same_handle("net1.c12", "net1.c1"));
    }

    #[test]
    fn endpoint_names_are_calicos() {
        let parts = [("node", "named-host"), ("orchestrator", "cni"), ("containerID", "abcd"), ("endpoint", "eth0")];
        assert_eq!(workload_endpoint_name(&parts).unwrap(), "named--host-cni-abcd-eth0");
        assert_eq!(
            workload_endpoint_name(&[("node", "n"), ("containerID", "bad4-")]).unwrap_err().to_string(),
            "error constructing WorkloadEndpoint name: error with field containerID = 'bad4-' (field must not end with a '-')"
        );
        assert!(workload_endpoint_name(&[("node", "")]).unwrap_err().to_string().contains("should be assigned"));
    }
}
