//! Determines the sticky name of a workload from `ipam.sticky`, `args.cni.labels` or `MARGAY_STICKY` in `CNI_ARGS`.

use std::time::Duration;

use agent::{CniError, Result};
use ipam_core::sticky::{MAX_WAIT, Sticky};
use ipam_core::timestamps::parse_span;

use crate::env::CniArgs;
use crate::gojson::{GoJson, quoted};
use crate::kubernetes::Kubernetes;
use crate::netconf::NetConf;

/// Default time for which a released sticky address is kept for its workload.
const DEFAULT_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The source of a workload's sticky name.
#[derive(Debug, PartialEq, Eq)]
enum StickySource<'a> {
    /// The sticky name is the namespace and name of the container's pod, unless Kubernetes has generated the name: no
    /// later pod will have a generated name.
    Pod,
    /// The sticky name is the namespace and name of the container's pod.
    EveryPod,
    /// The sticky name is the value of `K8S_POD_NAME` alone, which is the container's name under podman.
    Container,
    Label(&'a str),
    Annotation(&'a str),
}

/// Checks the setting `ipam.sticky`.
///
/// # Errors
/// CNI error code 7 for an invalid value of `ipam.sticky`.
pub(crate) fn check(conf: &NetConf) -> Result<()> {
    conf.ipam.sticky.as_ref().map_or(Ok(()), |value| read(value).map(drop))
}

/// Returns the sticky name of this container. Returns `None` if sticky addresses are off, or if the container lacks the
/// configured label, annotation or pod name. A label or annotation that is not in the network configuration is read
/// from the pod in the Kubernetes API within `patience`, provided that an API is configured.
///
/// # Errors
/// CNI error code 7 for an invalid value of `ipam.sticky`, and any error of the Kubernetes API.
pub(crate) fn sticky(
    conf: &NetConf,
    args: &CniArgs,
    pod: Option<&(String, String)>,
    kubernetes: &Kubernetes,
    patience: Duration,
) -> Result<Option<Sticky>> {
    let (by, wait) = match &conf.ipam.sticky {
        Some(value) => read(value)?,
        None if args.sticky.is_empty() => return Ok(None),
        None => (StickySource::Pod, Some(DEFAULT_WAIT)),
    };
    let in_namespace = |name: String| match pod {
        Some((namespace, _)) => format!("{namespace}/{name}"),
        None => name,
    };
    let name = match by {
        _ if !args.sticky.is_empty() => Some(args.sticky.clone()),
        StickySource::Pod | StickySource::EveryPod => pod
            .filter(|(_, name)| by == StickySource::EveryPod || !is_generated(name))
            .map(|(namespace, pod)| format!("{namespace}/{pod}")),
        StickySource::Container => Some(args.pod.clone()).filter(|name| !name.is_empty()),
        StickySource::Label(key) => match label(conf, key) {
            Some(value) => Some(in_namespace(value)),
            None => read_from_pod(conf, pod, kubernetes, by, patience)?.map(in_namespace),
        },
        StickySource::Annotation(key) => match annotation(conf, key) {
            Some(value) => Some(in_namespace(value)),
            None => read_from_pod(conf, pod, kubernetes, by, patience)?.map(in_namespace),
        },
    };
    let Some(name) = name else {
        tracing::debug!("the workload has no name for a sticky address; assigning any free address");
        return Ok(None);
    };
    Sticky::check_name(&name).map_err(|reason| CniError::config(reason).with_details(quoted(&name)))?;
    Ok(Some(Sticky { name, wait }))
}

/// Parses the value of `ipam.sticky`, which is the string `"pod"`, or an object with the fields `by` and `for`.
fn read(value: &GoJson) -> Result<(StickySource<'_>, Option<Duration>)> {
    let by = match value {
        GoJson::Object(_) => value.member("by"),
        _ => Some(value),
    };
    let by = match by.map(GoJson::as_str) {
        None | Some(Some("pod")) => StickySource::Pod,
        Some(Some("every-pod")) => StickySource::EveryPod,
        Some(Some("container")) => StickySource::Container,
        Some(Some(text)) => match text.split_once(':') {
            Some(("label", key)) if !key.is_empty() => StickySource::Label(key),
            Some(("annotation", key)) if !key.is_empty() => StickySource::Annotation(key),
            _ => return Err(wrong_by()),
        },
        Some(None) => return Err(wrong_by()),
    };
    let wait = match value.member("for") {
        None => Some(DEFAULT_WAIT),
        Some(text) => wait(text.as_str().unwrap_or_default())?,
    };
    Ok((by, wait))
}

/// Returns true if Kubernetes has generated the pod's name, as for the pods of Deployments, DaemonSets and Jobs: such a
/// name ends in a hyphen and five random characters (`k8s.io/apimachinery/pkg/util/rand`). Five digits are taken for the
/// number of a StatefulSet's pod.
fn is_generated(pod: &str) -> bool {
    const RANDOM_CHARS: &str = "bcdfghjklmnpqrstvwxz2456789";
    const RANDOM_LENGTH: usize = 5;
    let Some((_, end)) = pod.rsplit_once('-') else { return false };
    end.len() == RANDOM_LENGTH
        && end.chars().all(|char| RANDOM_CHARS.contains(char))
        && !end.chars().all(|char| char.is_ascii_digit())
}

fn wrong_by() -> CniError {
    CniError::config(
        "ipam.sticky.by must be \"pod\", \"every-pod\", \"container\", \"label:NAME\" or \"annotation:NAME\"",
    )
}

/// Parses the time for which a sticky address is kept: a whole number with the unit `s`, `m`, `h` or `d`, or the text
/// `forever`, which is returned as `None`.
fn wait(text: &str) -> Result<Option<Duration>> {
    let wrong =
        || CniError::config("ipam.sticky.for must be a time such as \"90s\", \"15m\", \"2h\", \"3d\" or \"forever\"");
    if text == "forever" {
        return Ok(None);
    }
    let wait = parse_span(text).filter(|wait| !wait.is_zero() && *wait <= MAX_WAIT);
    wait.map(Some).ok_or_else(wrong)
}

/// Finds the value of a label in `args.cni.labels`, a list of objects with `key` and `value`.
fn label(conf: &NetConf, key: &str) -> Option<String> {
    let labels = conf.args_labels.as_ref().map(GoJson::one_or_many).unwrap_or_default();
    let of = |label: &&GoJson| label.member("key").and_then(GoJson::as_str) == Some(key);
    non_empty_text(labels.iter().find(of)?.member("value"))
}

/// Finds the value of a pod annotation in `runtimeConfig`, where containerd and CRI-O pass annotations to plugins that
/// request them.
fn annotation(conf: &NetConf, key: &str) -> Option<String> {
    non_empty_text(conf.runtime_annotations.as_ref()?.member(key))
}

fn non_empty_text(value: Option<&GoJson>) -> Option<String> {
    value.and_then(GoJson::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Reads a label or annotation of the pod from the Kubernetes API, if an API is configured.
fn read_from_pod(
    conf: &NetConf,
    pod: Option<&(String, String)>,
    kubernetes: &Kubernetes,
    by: StickySource<'_>,
    patience: Duration,
) -> Result<Option<String>> {
    let Some((namespace, pod)) = pod.filter(|_| Kubernetes::are_looked_up(conf)) else {
        return Ok(None);
    };
    let mut pod = kubernetes.pod(namespace, pod, patience)?;
    let value = match by {
        StickySource::Label(key) => pod.labels.remove(key),
        StickySource::Annotation(key) => pod.annotations.remove(key),
        StickySource::Pod | StickySource::EveryPod | StickySource::Container => None,
    };
    Ok(value.filter(|value| !value.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{AddressForm, Environment};

    fn of(ipam: &str, rest: &str, cni_args: &str) -> Result<Option<Sticky>> {
        let text = format!(r#"{{"name":"net","ipam":{{{ipam}}}{rest}}}"#);
        let conf = NetConf::decode(&GoJson::parse(text.as_bytes()).unwrap()).unwrap();
        let args = CniArgs::parse(cni_args, AddressForm::Bare).unwrap();
        let is_pod = !args.pod.is_empty() && !args.pod_namespace.is_empty();
        let pod = is_pod.then(|| (args.pod_namespace.clone(), args.pod.clone()));
        let kubernetes = Kubernetes::from_conf(&conf, &Environment::default());
        sticky(&conf, &args, pod.as_ref(), &kubernetes, Duration::from_secs(1))
    }

    fn named(ipam: &str, rest: &str, cni_args: &str) -> Option<String> {
        of(ipam, rest, cni_args).unwrap().map(|sticky| sticky.name)
    }

    const POD: &str = "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0";
    const LABELS: &str = r#","args":{"cni":{"labels":[{"key":"other","value":"x"},{"key":"app","value":"db"}]}}"#;

    #[test]
    fn sticky_name_comes_from_configured_source() {
        assert_eq!(named("", "", POD), None);
        assert_eq!(named(r#""sticky":null"#, "", POD), None);
        for sticky in [r#""pod""#, r#"{"by":"pod"}"#, "{}", r#"{"for":"1h"}"#] {
            assert_eq!(named(&format!(r#""sticky":{sticky}"#), "", POD).unwrap(), "shop/web-0", "{sticky}");
            assert_eq!(named(&format!(r#""sticky":{sticky}"#), "", ""), None, "{sticky}");
        }
        assert_eq!(named(r#""sticky":"container""#, "", POD).unwrap(), "web-0");
        assert_eq!(named(r#""sticky":"label:app""#, LABELS, POD).unwrap(), "shop/db");
        assert_eq!(named(r#""sticky":"label:app""#, LABELS, "").unwrap(), "db");
        assert_eq!(named(r#""sticky":"label:none""#, LABELS, POD), None);
        let annotations = r#","runtimeConfig":{"io.kubernetes.cri.pod-annotations":{"ip/name":"db"}}"#;
        assert_eq!(named(r#""sticky":{"by":"annotation:ip/name"}"#, annotations, POD).unwrap(), "shop/db");
        assert_eq!(named(r#""sticky":{"by":"annotation:other"}"#, annotations, POD), None);
    }

    #[test]
    fn sticky_pod_name_is_ignored_when_generated() {
        let named = |by: &str, pod: &str| {
            named(&format!(r#""sticky":"{by}""#), "", &format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod}"))
        };
        for pod in ["web-7d9c5b8f6-x2x9z", "agent-wqm4k", "job-0-b4zt8", "virt-launcher-vm1-2xk7c"] {
            assert_eq!(named("pod", pod), None, "{pod}");
            assert_eq!(named("every-pod", pod).unwrap(), format!("shop/{pod}"));
        }
        for pod in ["web-0", "web-24567", "printer", "db-mysql", "x2x9z", "cache-b4zt", "web-7d9c5b8f6-x2x9za"] {
            assert_eq!(named("pod", pod).unwrap(), format!("shop/{pod}"));
        }
    }

    #[test]
    fn sticky_argument_of_call_comes_first() {
        let args = "IgnoreUnknown=1;MARGAY_STICKY=printer";
        assert_eq!(named("", "", args).unwrap(), "printer");
        assert_eq!(named(r#""sticky":{"by":"label:app","for":"1h"}"#, LABELS, args).unwrap(), "printer");
        let sticky = of(r#""sticky":{"for":"1h"}"#, "", args).unwrap().unwrap();
        assert_eq!(sticky.wait, Some(Duration::from_secs(3600)));
    }

    #[test]
    fn sticky_wait_is_read() {
        let wait =
            |text: &str| of(&format!(r#""sticky":{{"for":{text}}}"#), "", POD).map(|sticky| sticky.unwrap().wait);
        for (text, seconds) in [("90s", 90), ("15m", 900), ("2h", 7200), ("3d", 259_200)] {
            assert_eq!(wait(&format!("\"{text}\"")).unwrap(), Some(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(wait("\"forever\"").unwrap(), None);
        assert_eq!(of(r#""sticky":"pod""#, "", POD).unwrap().unwrap().wait, Some(DEFAULT_WAIT));
        for text in ["0s", "", "h", "-1h", "1.5h", "1w", "99999999d", "18446744073709551615d", "ü"] {
            assert_eq!(wait(&format!("\"{text}\"")).unwrap_err().code().number(), 7, "{text}");
        }
        assert_eq!(wait("60").unwrap_err().code().number(), 7);
    }

    #[test]
    fn sticky_source_is_refused_when_it_names_nothing() {
        for sticky in [r#""label:""#, r#""name""#, r#"{"by":"annotation:"}"#, r#"{"by":5}"#, "true", "[]"] {
            let error = of(&format!(r#""sticky":{sticky}"#), "", POD).unwrap_err();
            assert!(error.message().starts_with("ipam.sticky.by must be"), "{sticky}: {error}");
        }
        let long = "n".repeat(600);
        of("", "", &format!("IgnoreUnknown=1;MARGAY_STICKY={long}")).unwrap_err();
    }
}
