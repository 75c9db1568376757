//! Lists the plugin calls whose expected outcome differs from Calico's plugin, with the reasons.
//!
//! If the plugin has the recorded outcome although [`EXCEPTIONS`] expects another, the test of that case fails, so that
//! needless entries are noticed.

use std::fmt;

use crate::Kind;
use crate::edits::Edit::{
    self, Accepts, AsBefore, AsBeforeButSettings, AsksNothing, CallsItself, Copy, Gone, Is, Like, StateLike, TakenBack,
    Text,
};

/// Steps of a recorded case whose expected outcome differs from the recorded outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exception {
    /// The name of a recorded case, or [`EACH`].
    pub(crate) case: &'static str,
    pub(crate) steps: Steps,
    pub(crate) stores: Stores,
    pub(crate) edits: &'static [Edit],
    /// The reason why the expected outcome differs from the recorded outcome.
    pub(crate) reason: &'static str,
}

/// The case name that stands for all recorded cases.
pub(crate) const EACH: &str = "*";

/// Steps of a recorded case, counted from 1.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Steps {
    All,
    One(usize),
    From(usize),
}
use Steps::{All, From, One};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Stores {
    Any,
    /// The embedded stores: sled and redb.
    Embedded,
}
use Stores::{Any, Embedded};

impl Exception {
    pub(crate) fn is_for(&self, case: &str, step: usize, kind: Kind) -> bool {
        let steps = match self.steps {
            All => true,
            One(one) => step == one,
            From(first) => step >= first,
        };
        let stores = match self.stores {
            Any => true,
            Embedded => kind != Kind::Etcd,
        };
        (self.case == EACH || self.case == case) && steps && stores
    }
}

impl fmt::Display for Exception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the exception for {} {:?} ({})", self.case, self.steps, self.reason)
    }
}

/// Recorded cases that are replayed only on etcd, with the reasons.
pub(crate) const ON_ETCD_ONLY: &[(&str, &str)] = &[
    ("cluster-information-missing", "an embedded store has no ClusterInformation"),
    ("cluster-information-without-flag", "an embedded store has no ClusterInformation"),
    ("datastore", "it is about the address of etcd"),
    ("flags", "it is about the address of etcd"),
    ("no-node", "an embedded store needs no Node"),
    ("nodename-file-missing", "no agent of Calico's writes that file where the store is one machine's"),
    ("node-name-with-dashes", "it is about two nodes, and an embedded store is one node's"),
    ("not-ready", "an embedded store has no ClusterInformation"),
    (
        "pod-without-kubeconfig",
        "a pod on one machine needs no Kubernetes; the test with containerd's CRI runs such pods",
    ),
];

const fn case(case: &'static str, steps: Steps, edits: &'static [Edit], reason: &'static str) -> Exception {
    Exception { case, steps, stores: Any, edits, reason }
}

const fn embedded(case: &'static str, steps: Steps, edits: &'static [Edit], reason: &'static str) -> Exception {
    Exception { case, steps, stores: Embedded, edits, reason }
}

const UNDONE: &str = "a failed ADD leaves nothing behind";
const FIRST: &str = "what the configuration and the names say is checked before anything is done";
const UNTOUCHED: &str = "the ADD before it has not touched the container's settings";
const ANEW: &str = "the container gets its interface in the network namespace that it has now";
const PANIC: &str = "Calico's plugin panics where an error is due";
const ROUTED: &str = "without Felix a pod with addresses of its own choice must be reachable too";
const NETNS: &str = "the plugin's own network namespace is refused before the work";
const ZERO: &str = "0 is no error's code";
const DEADLINE: &str = "a call on a datastore that does not answer ends with code 11";
const NEWER: &str = "CNI 1.1.0 is offered";
const CHECKED: &str = "CHECK looks at what there is";
const NEVER_SET_UP: &str = "a container whose ADD failed for set-up has nothing to release";
const FORWARDS: &str = "without an agent of Calico's the plugin lets the host forward IPv6";
const REPLACED: &str = "an endpoint's floating addresses are replaced with the pod's address";

/// Expects that the plugin call changes nothing and sends no IPAM call.
const NOTHING_DONE: &[Edit] = &[AsBefore, Is(&["ipam_calls"], "[]")];
const NOTHING_ASKED: &[Edit] = &[AsBefore, Is(&["ipam_calls"], "[]"), Is(&["api_requests"], "[]")];
const OWN_NETNS: &[Edit] = &[
    AsBefore,
    Is(&["ipam_calls"], "[]"),
    Is(&["stdout"], r#"{"code":8,"msg":"plugin's netns and netns from CNI_NETNS should not be the same"}"#),
];

const POD_ENDPOINT: &str = "/calico/resources/v3/projectcalico.org/workloadendpoints/shop/node1-k8s-pod1-eth0";
const POD_ROUTES: &[&str] = &["host", "interfaces", "cali8085686fbb3", "routes"];
const BOTH_ROUTES: &str = r#"[
    {"type":"unicast","dst":"10.65.1.5","protocol":"boot","scope":"link"},
    {"type":"unicast","dst":"fd80:24e2:f998:72d6::5","protocol":"boot","scope":"global","metric":1024},
    {"type":"unicast","dst":"fe80::/64","protocol":"kernel","scope":"global","metric":256}
]"#;

pub(crate) const EXCEPTIONS: &[Exception] = &[
    case(EACH, All, &[AsksNothing("calico-ipam")], "the namespace is asked for only if a pool selects namespaces"),
    case(EACH, All, &[CallsItself("calico", "margay")], "the program is another one"),
    case(EACH, All, &[CallsItself("Go-http-client", "margay")], "the program is another one"),
    case(
        EACH,
        All,
        &[
            Accepts("application/vnd.kubernetes.protobuf,application/json", "application/json"),
            Accepts("application/json, */*", "application/json"),
        ],
        "Margay reads JSON only",
    ),
    case(
        "cni-version-unsupported",
        One(1),
        &[Like("plain", 1, &[]), Is(&["stdout", "cniVersion"], "\"1.1.0\"")],
        NEWER,
    ),
    case("cni-version-unsupported", From(2), &[Text("\"1.0.0\"]", "\"1.0.0\" \"1.1.0\"]")], NEWER),
    case("cni-version-unsupported", One(5), &[Like("plain", 2, &[])], NEWER),
    case(
        "mesos-labels",
        One(4),
        &[Gone(&[
            "etcd",
            "documents",
            "/calico/resources/v3/projectcalico.org/workloadendpoints/team.blue/node1-cni-c2-eth0",
        ])],
        "DEL knows the namespace that the labels named",
    ),
    case("mesos-labels-invalid", One(1), NOTHING_DONE, FIRST),
    case("mesos-labels-invalid", One(2), &[AsBefore], UNTOUCHED),
    case("mesos-labels-invalid", One(3), NOTHING_DONE, FIRST),
    case("mesos-labels-invalid", One(4), &[AsBefore], UNTOUCHED),
    case(
        "repeated-add-after-netns-was-lost",
        One(3),
        &[Text("<mac:1>", "<mac:2>"), StateLike("repeated-add-after-netns-was-lost", 1, &[("<mac:1>", "<mac:2>")])],
        ANEW,
    ),
    case(
        "repeated-add-after-netns-was-lost",
        One(4),
        &[Is(&["netns", "a", "sysctls", "ipv4/ip_forward"], "\"0\"")],
        ANEW,
    ),
    case(
        "repeated-add-after-netns-was-lost",
        One(3),
        &[Is(
            &["ipam_calls"],
            r#"[
                {"plugin":"calico-ipam","env":{"CNI_ARGS":"IgnoreUnknown=1","CNI_COMMAND":"DEL","CNI_CONTAINERID":"c1",
                    "CNI_IFNAME":"eth0","CNI_NETNS":"<netns:a>","CNI_PATH":"<bin>"},"stdin":"as given to the plugin","exit":0},
                {"plugin":"calico-ipam","env":{"CNI_ARGS":"IgnoreUnknown=1","CNI_COMMAND":"ADD","CNI_CONTAINERID":"c1",
                    "CNI_IFNAME":"eth0","CNI_NETNS":"<netns:a>","CNI_PATH":"<bin>"},"stdin":"as given to the plugin","exit":0}
            ]"#,
        )],
        "another container may have the address by now, which IPAM knows",
    ),
    case("dataplane-options", One(1), NOTHING_DONE, FIRST),
    case("dataplane-options", One(4), NOTHING_DONE, FIRST),
    case("ipam-fails", One(3), &[Is(&["stdout", "code"], "999")], ZERO),
    case("ipam-fails", One(6), &[Is(&["stdout", "code"], "999")], ZERO),
    case("netns-of-the-host", One(1), OWN_NETNS, NETNS),
    case("netns-of-the-host", One(1), &[Gone(&["stdout_text"])], NETNS),
    case("netns-of-the-host", One(2), &[AsBefore], NETNS),
    case("netns-of-the-host", One(3), OWN_NETNS, NETNS),
    case("netns-of-the-host", One(4), &[AsBefore], NETNS),
    case("nodename-file-missing", One(2), &[Like("plain", 3, &[])], NEVER_SET_UP),
    case("cluster-information-missing", One(2), &[Like("plain", 3, &[])], NEVER_SET_UP),
    case("nodename-file-missing", One(6), NOTHING_DONE, FIRST),
    case("nodename-file-missing", One(7), &[Is(&["host_local_files"], "{}")], FIRST),
    case("nodename-file-missing", From(8), &[Text("10.70.0.3", "10.70.0.2")], FIRST),
    case(
        "nodename-sources",
        One(7),
        &[Like(
            "nodename-sources",
            4,
            &[
                ("c2", "c3"),
                ("from--file", "node1"),
                ("from-file", "node1"),
                ("10.70.0.3", "10.70.0.4"),
                ("<mac:2>", "<mac:3>"),
                ("<uid:3>", "<uid:4>"),
            ],
        )],
        "a newline at the end of the file is no part of the node's name",
    ),
    case("nodename-sources", One(9), NOTHING_DONE, FIRST),
    case("cluster-information-without-flag", All, &[Is(&["stdout", "msg"], "\"<any>\"")], PANIC),
    case("datastore", One(3), NO_ANSWER, DEADLINE),
    case("datastore", One(5), NO_ANSWER, DEADLINE),
    case("names", One(4), NOTHING_DONE, FIRST),
    case("names", One(5), &[AsBefore], UNTOUCHED),
    case("names", One(9), NOTHING_DONE, FIRST),
    case("names", One(10), &[AsBefore], UNTOUCHED),
    case("names", One(11), NOTHING_DONE, FIRST),
    case("names", One(12), &[AsBefore], UNTOUCHED),
    case("names", One(13), &[Text("10.65.166.131", "10.65.166.128")], FIRST),
    case("names", One(15), NOTHING_DONE, FIRST),
    case("names", One(19), NOTHING_DONE, FIRST),
    case("names", One(21), &[Text("10.65.166.134", "10.65.166.129")], FIRST),
    // The digits in the interface name are the first 11 hexadecimal digits of the SHA-1 of `default.0123456789abef`.
    case("same-first-eleven", From(2), &[Text("cali0123456789a", "calie44e16eb145")], CLASH),
    case(
        "same-first-eleven",
        One(2),
        &[
            Is(&["host", "links"], r#"["cali0123456789a","calie44e16eb145"]"#),
            Copy(&["host", "interfaces", "cali0123456789a"], 1),
            Copy(&["netns", "a"], 1),
            Copy(
                &[
                    "etcd",
                    "documents",
                    "/calico/resources/v3/projectcalico.org/workloadendpoints/default/node1-cni-0123456789abcd-eth0",
                ],
                1,
            ),
        ],
        CLASH,
    ),
    case(
        "environment",
        One(7),
        &[Is(&["stdout", "supportedVersions"], r#"["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]"#)],
        NEWER,
    ),
    case("check-gc-status", One(1), NOT_THERE, CHECKED),
    case("check-gc-status", One(2), NOT_THERE, CHECKED),
    case("check-gc-status", One(4), &[Is(&["stdout"], "\"<any>\""), Is(&["ipam_calls"], "\"<any>\"")], CHECKED),
    case(
        "check-gc-status",
        One(6),
        &[
            Is(&["exit"], "0"),
            Gone(&["stdout"]),
            Is(&["stdout_text"], "\"\""),
            Is(
                &["ipam_calls"],
                r#"[{"plugin":"calico-ipam","env":{"CNI_ARGS":"IgnoreUnknown=1","CNI_COMMAND":"GC","CNI_CONTAINERID":"c1",
                    "CNI_IFNAME":"eth0","CNI_NETNS":"<netns:a>","CNI_PATH":"<bin>"},"stdin":"as given to the plugin","exit":0}]"#,
            ),
        ],
        NEWER,
    ),
    case(
        "check-gc-status",
        One(8),
        &[
            Is(&["exit"], "0"),
            Gone(&["stdout"]),
            Is(&["stdout_text"], "\"\""),
            Is(
                &["ipam_calls"],
                r#"[{"plugin":"calico-ipam","env":{"CNI_ARGS":"IgnoreUnknown=1","CNI_COMMAND":"STATUS","CNI_CONTAINERID":"c1",
                    "CNI_IFNAME":"eth0","CNI_NETNS":"<netns:a>","CNI_PATH":"<bin>"},"stdin":"as given to the plugin","exit":0}]"#,
            ),
        ],
        NEWER,
    ),
    case("host-route-exists", One(2), &[AsBeforeButSettings], UNDONE),
    case("host-route-exists-global", One(2), &[AsBeforeButSettings], UNDONE),
    case("host-route-exists-global", One(5), &[AsBeforeButSettings], UNDONE),
    embedded(
        "pod-use-pod-cidr",
        One(14),
        &[Is(&["host", "interfaces", "cali8085686fbb3", "sysctls", "ipv6/conf/<if>/forwarding"], "\"1\"")],
        FORWARDS,
    ),
    case("container-route-exists", One(2), &[AsBefore], UNDONE),
    case(
        "policy-type-without-kubernetes",
        One(3),
        &[
            Like("plain", 1, &[("c1", "c2"), ("<mac:1>", "<mac:2>")]),
            Gone(&["etcd", "documents", "/calico/resources/v3/projectcalico.org/profiles/net1"]),
            Copy(&["host_local_files"], 2),
        ],
        "the namespace is asked for only if a pool selects namespaces",
    ),
    case(
        "policy-type-without-kubernetes",
        One(4),
        &[StateLike("policy-type-without-kubernetes", 2, &[])],
        "the namespace is asked for only if a pool selects namespaces",
    ),
    case("log-file", One(3), &[Is(&["mode"], "\"0o600\"")], "a log is for its owner only"),
    case("pod-ip-addrs", One(1), &[Is(POD_ROUTES, BOTH_ROUTES)], ROUTED),
    case("pod-ip-addrs", One(3), &[Is(POD_ROUTES, BOTH_ROUTES)], ROUTED),
    case("pod-ip-addrs-bad", One(13), &[AsBefore, TakenBack], UNDONE),
    case(
        "pod-ip-addrs-bad",
        One(17),
        &[Is(
            POD_ROUTES,
            r#"[
                {"type":"unicast","dst":"10.65.1.5","protocol":"boot","scope":"link"},
                {"type":"unicast","dst":"fe80::/64","protocol":"kernel","scope":"global","metric":256}
            ]"#,
        )],
        ROUTED,
    ),
    case("pod-ip-addrs-no-ipam", One(2), &[Is(POD_ROUTES, BOTH_ROUTES)], ROUTED),
    case("pod-floating-ips", One(1), NOTHING_DONE, FIRST),
    case("pod-floating-ips", One(2), &[AsBefore], UNTOUCHED),
    case("pod-floating-ips", One(6), NOTHING_DONE, FIRST),
    case("pod-floating-ips", One(9), &[Is(&["stdout", "msg"], "\"<any>\""), AsBefore, TakenBack], PANIC),
    case(
        "pod-floating-ips",
        One(12),
        &[Is(&["stdout", "msg"], "\"<any>\""), AsBefore, Is(&["ipam_calls"], "[]")],
        PANIC,
    ),
    case(
        "pod-floating-ips-add-again",
        One(2),
        &[
            Like("pod-restarted", 2, &[]),
            Is(
                &["etcd", "documents", POD_ENDPOINT, "spec", "ipNATs"],
                r#"[{"internalIP":"10.65.166.129","externalIP":"10.65.200.1"}]"#,
            ),
        ],
        REPLACED,
    ),
    case("pod-floating-ips-add-again", One(3), &[Gone(&["etcd", "documents", POD_ENDPOINT])], REPLACED),
    case(
        "pod-floating-ips-add-again",
        One(5),
        &[Like(
            "pod-restarted",
            2,
            &[("10.65.166.129", "10.65.166.130"), ("<mac:2>", "<mac:3>"), ("<uid:1>", "<uid:2>")],
        )],
        REPLACED,
    ),
    case("pod-floating-ips-add-again", One(6), &[Gone(&["etcd", "documents", POD_ENDPOINT])], REPLACED),
    case("pod-hw-addr", One(4), NOTHING_DONE, FIRST),
    case("pod-hw-addr", One(7), &[AsBefore], UNDONE),
    case("pod-hw-addr", One(13), NOTHING_DONE, FIRST),
    case(
        "pod-same-add-twice",
        One(2),
        &[Text("10.65.166.129", "10.65.166.128"), StateLike("pod-same-add-twice", 1, &[("<mac:1>", "<mac:2>")])],
        "the same attachment that asks again gets the same address",
    ),
    case(
        "pod-second-interface",
        One(3),
        &[Copy(&["etcd", "ipam"], 1)],
        "DEL of an interface leaves the address of the other one",
    ),
    case(
        "pod-use-pod-cidr-and-another-range",
        One(2),
        &[Is(&["ipam_calls", "0", "stdin", "ipam", "ranges"], r#"[[{"subnet":"10.100.0.0/24"}]]"#)],
        "newer versions of host-local refuse the range that stands for the pods' one beside another",
    ),
    case("pod-routes", One(8), NOTHING_ASKED, FIRST),
    case("pod-routes", One(9), &[Text("10.70.0.22", "10.70.0.21")], FIRST),
    case("pod-policy-wait", One(6), NOTHING_ASKED, FIRST),
];

const CLASH: &str = "a container does not take the interface of another one whose id begins the same";

const NO_ANSWER: &[Edit] =
    &[Is(&["exit"], "1"), Gone(&["stdout_text"]), Is(&["stdout"], r#"{"code":11,"msg":"<any>"}"#)];
const NOT_THERE: &[Edit] =
    &[Is(&["exit"], "1"), Gone(&["stdout_text"]), Is(&["stdout"], "\"<any>\""), Is(&["ipam_calls"], "\"<any>\"")];
