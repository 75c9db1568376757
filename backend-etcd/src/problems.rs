//! Describes the problems that an etcd member reports in its status in words for operators. etcd reports them as text.

use driver::{ClusterProblem, ClusterProblemKind};

/// The words with which etcd names the member that raised an alarm, and the alarm.
const MEMBER_FIELD: &str = "memberID:";
const ALARM_FIELD: &str = "alarm:";

/// Describes one entry of the errors in a member's status. etcd 3.4 reports an alarm, for example, as
/// `memberID:10276657743932975437 alarm:NOSPACE `.
pub(crate) fn describe_problem(reported: &str) -> ClusterProblem {
    let field = |name: &str| reported.split_whitespace().find_map(|word| word.strip_prefix(name));
    let member = field(MEMBER_FIELD).and_then(|id| id.parse::<u64>().ok());
    // etcdctl member list shows a member's id in this form.
    let member = member.map_or_else(String::new, |id| format!(" of member {id:x}"));
    match field(ALARM_FIELD) {
        Some("NOSPACE") => ClusterProblem {
            kind: ClusterProblemKind::NoSpace,
            text: format!("etcd's quota is used up, and it refuses changes (alarm NOSPACE{member})"),
            next_step: Some("margay etcd compact --keep 0s, then etcdctl defrag --cluster, then etcdctl alarm disarm"),
        },
        Some("CORRUPT") => ClusterProblem {
            kind: ClusterProblemKind::Corrupt,
            text: format!("the members' data differ, and etcd refuses changes (alarm CORRUPT{member})"),
            next_step: Some(
                "see which member is wrong with etcdctl endpoint hashkv --cluster, replace it, then etcdctl alarm disarm",
            ),
        },
        Some(alarm) => ClusterProblem {
            kind: ClusterProblemKind::Other,
            text: format!("etcd has raised the alarm {alarm}{member}"),
            next_step: Some("look the alarm up in etcd's documentation, mend it, then etcdctl alarm disarm"),
        },
        None if reported.trim() == "etcdserver: no leader" => ClusterProblem {
            kind: ClusterProblemKind::Other,
            text: "the member knows no leader, and answers neither reads nor changes".to_owned(),
            next_step: Some("see which members run with etcdctl endpoint health --cluster, and start the others"),
        },
        None => ClusterProblem { kind: ClusterProblemKind::Other, text: reported.trim().to_owned(), next_step: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_are_described_in_words() {
        use ClusterProblemKind::{Corrupt, NoSpace, Other};
        for (reported, kind, words) in [
            (
                "memberID:10276657743932975437 alarm:NOSPACE ",
                NoSpace,
                "(alarm NOSPACE of member 8e9e05c52164694d): margay",
            ),
            // Alarms that a client raised without naming a member; etcd 3.6 separates the fields by two spaces at times.
            ("alarm:NOSPACE ", NoSpace, "is used up, and it refuses changes (alarm NOSPACE): margay etcd compact"),
            ("memberID:255  alarm:CORRUPT", Corrupt, "(alarm CORRUPT of member ff): see which member"),
            ("memberID:1 alarm:OTHER ", Other, "the alarm OTHER of member 1: look"),
            ("etcdserver: no leader", Other, "knows no leader"),
        ] {
            let problem = describe_problem(reported);
            assert_eq!(problem.kind, kind, "{reported}");
            assert!(problem.to_string().contains(words), "{problem}");
            assert!(!problem.to_string().contains("alarm:"), "{problem}");
        }
        assert_eq!(describe_problem("strange ").to_string(), "strange");
    }
}
