//! The findings of a check.

use ipam_operator::inspect::{Code, Counts, Finding, Keep, Severity, Subject};
use kv::Deadline;
use serde::Serialize;

use super::super::Shown;
use super::super::answer::{Answer, Failure};
use super::super::asked::{MOMENT, READING};
use super::made;

/// The most findings in an answer.
const MOST: usize = 300;

#[derive(Serialize)]
struct Reported<'a> {
    revision: i64,
    problems: usize,
    total: usize,
    counts: Counts,
    findings: Vec<Problem<'a>>,
}

#[derive(Serialize)]
struct Problem<'a> {
    code: Code,
    severity: Severity,
    meaning: &'static str,
    subject: String,
    /// The view of the page that shows the subject.
    link: Option<Link>,
    what: &'a str,
    mend: &'static str,
    repairable: bool,
    command: Option<String>,
}

#[derive(Serialize)]
struct Link {
    kind: &'static str,
    name: String,
}

impl Link {
    fn of(subject: &Subject) -> Option<Self> {
        let (kind, name) = match subject {
            Subject::Block(cidr) | Subject::Affinity(_, cidr) => ("block", cidr.to_string()),
            Subject::Address(ip) => ("address", ip.to_string()),
            Subject::Node(name) => ("node", name.clone()),
            Subject::Pool(name) => ("pool", name.clone()),
            Subject::Handle(id) => ("container", id.clone()),
            _ => return None,
        };
        Some(Self { kind, name })
    }
}

pub(super) async fn answer(shown: &Shown) -> Result<Answer, Failure> {
    let read = shown.asked.alone(problems(shown));
    Ok(made(&shown.asked.problems.get("", MOMENT, read).await?))
}

async fn problems(shown: &Shown) -> Result<String, Failure> {
    let mut inspection = shown.operator.inspect(Keep::Findings, Deadline::after(READING)).await?;
    let (problems, total) = (inspection.problems(), inspection.findings.len());
    // Problems come before information.
    inspection.findings.sort_by_key(|finding| !finding.is_problem());
    let store = quoted(&shown.about.store);
    let reported = Reported {
        revision: inspection.revision.get(),
        problems,
        total,
        counts: inspection.counts,
        findings: inspection.findings.iter().take(MOST).map(|finding| problem(finding, &store)).collect(),
    };
    serde_json::to_string(&reported).map_err(Failure::store)
}

fn problem<'a>(finding: &'a Finding, store: &str) -> Problem<'a> {
    let Finding { code, subject, what, mendable, .. } = finding;
    Problem {
        code: *code,
        severity: code.severity(),
        meaning: code.meaning(),
        subject: subject.to_string(),
        link: Link::of(subject),
        what,
        mend: finding.mend(),
        repairable: *mendable,
        command: command(finding, store),
    }
}

/// The command that mends a finding, or the next step if only a person can mend it.
fn command(finding: &Finding, store: &str) -> Option<String> {
    if finding.mendable {
        return Some(format!("margay ipam check --store {store} --repair {} --apply", finding.code));
    }
    Some(match (finding.code, &finding.subject) {
        (Code::HolderGone, _) => format!("margay ipam check --store {store} --report report.json"),
        (Code::NoHandle, Subject::Address(ip)) => format!("margay ipam release --store {store} --ip {ip}"),
        (_, Subject::Address(ip)) => format!("margay ipam history {ip} --store {store}"),
        (_, Subject::Pool(_)) => format!("margay pool list --store {store}"),
        (_, Subject::Reservation(_)) => format!("margay reservation list --store {store}"),
        (_, Subject::Block(_)) => format!("margay ipam show --store {store} --show-blocks"),
        _ => return None,
    })
}

/// A text as a shell takes it for one word.
fn quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b":/.,_+@%-=".contains(&byte);
    if text.bytes().all(is_plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_the_store_for_one_word() {
        assert_eq!(quoted("etcd://a:2379,b:2379"), "etcd://a:2379,b:2379");
        assert_eq!(quoted("etcd://[::1]:2379"), "'etcd://[::1]:2379'");
        assert_eq!(quoted("redb:///a b/it's;$(x)"), "'redb:///a b/it'\\''s;$(x)'");
    }
}
