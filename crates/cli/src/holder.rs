//! The holder of an address: the answer of `ipam show --ip`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

use ipam_core::quarantine::{QuarantineRow, Quarantined};
use ipam_core::sticky::{STICKY, STICKY_UNTIL};
use ipnet::IpNet;
use serde::Serialize;

use crate::answer::Answer;
use crate::error::Result;
use crate::output::printable;
use crate::quarantine::sentence;

/// The facts about an address.
#[derive(Clone, Debug)]
pub(crate) struct AddressReport {
    /// The address.
    pub(crate) ip: IpAddr,
    /// The prefix that has it, where the pool has prefixes.
    pub(crate) prefix: Option<IpNet>,
    /// The pool that has it in its range.
    pub(crate) pool: Option<String>,
    /// The reservations that cover it.
    pub(crate) reserved_by: Vec<String>,
    /// Why it is in quarantine, if it is.
    pub(crate) quarantined: Option<Quarantined>,
    /// The status.
    pub(crate) status: Status,
}

/// The status of an address.
#[derive(Clone, Debug)]
pub(crate) enum Status {
    /// The address is not assigned.
    Free,
    /// The address was released and is in cooldown.
    CoolingDown {
        /// The time of the release.
        released_at: Option<String>,
    },
    /// The address is assigned.
    Held(Holder),
}

/// The holder of an address.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Holder {
    /// The handle.
    pub(crate) handle: Option<String>,
    /// Its attributes.
    pub(crate) attributes: BTreeMap<String, String>,
    /// The attributes of a second owner, which only virtual machines have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) alternate_attributes: BTreeMap<String, String>,
}

impl AddressReport {
    /// The report as an answer in calicoctl's words, with notes about facts that calicoctl does not report.
    pub(crate) fn answer(&self) -> Result<Answer> {
        let mut answer = Answer::new(self.text(), &self.json())?;
        if self.pool.is_none() {
            answer = answer.note(format!("{} is in no pool", self.ip));
        }
        if let Status::Held(Holder { handle: None, attributes, .. }) = &self.status
            && let (Some(name), Some(until)) = (attributes.get(STICKY), attributes.get(STICKY_UNTIL))
        {
            answer = answer.note(format!(
                "nobody uses {}: it waits for {}, until: {}",
                self.ip,
                printable(name),
                printable(until)
            ));
        }
        for name in &self.reserved_by {
            answer = answer.note(format!("{} is reserved by reservation {}", self.ip, printable(name)));
        }
        if let Some(why) = &self.quarantined {
            let text = sentence(&QuarantineRow { address: self.ip, why: why.clone() });
            answer = answer.note(format!("{text}; to end it: margay ipam quarantine release {}", self.ip));
        }
        Ok(answer)
    }

    fn text(&self) -> String {
        let (kind, name) = match self.prefix {
            Some(prefix) => ("Prefix", prefix.to_string()),
            None => ("IP", self.ip.to_string()),
        };
        match &self.status {
            Status::Free => format!("{name} is not assigned"),
            Status::CoolingDown { released_at } => format!(
                "{name} is not assigned: it was released at {} and is in cooldown",
                released_at.as_deref().unwrap_or("an unknown time")
            ),
            Status::Held(holder) => format!("{kind} {name} is in use\n{}", holder.text()),
        }
    }

    fn json(&self) -> Json<'_> {
        let (holder, cooling_down_since) = match &self.status {
            Status::Free => (None, None),
            Status::CoolingDown { released_at } => (None, released_at.as_deref()),
            Status::Held(holder) => (Some(holder), None),
        };
        Json {
            ip: self.ip,
            prefix: self.prefix.map(|prefix| prefix.to_string()),
            in_use: holder.is_some(),
            pool: self.pool.as_deref(),
            reserved_by: &self.reserved_by,
            quarantined: self.quarantined.as_ref(),
            cooling_down_since,
            holder,
        }
    }
}

#[derive(Serialize)]
struct Json<'a> {
    ip: IpAddr,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix: Option<String>,
    in_use: bool,
    pool: Option<&'a str>,
    reserved_by: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<&'a Quarantined>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cooling_down_since: Option<&'a str>,
    #[serde(flatten)]
    holder: Option<&'a Holder>,
}

impl Holder {
    fn text(&self) -> String {
        let handle = self.handle.as_deref().map_or("<none>".into(), printable);
        let mut text = format!("Handle ID: {handle}\n");
        if self.attributes.is_empty() {
            text.push_str("No Active Owner attributes defined\n");
        } else {
            text.push_str("Active Owner Attributes:\n");
            list(&mut text, &self.attributes);
        }
        if !self.alternate_attributes.is_empty() {
            text.push_str("Alternate Owner Attributes:\n");
            list(&mut text, &self.alternate_attributes);
        }
        text
    }
}

fn list(text: &mut String, attributes: &BTreeMap<String, String>) {
    for (name, value) in attributes {
        _ = writeln!(text, "  {}: {}", printable(name), printable(value));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{json, to_value};

    use super::*;

    fn report(status: Status) -> AddressReport {
        let ip = "10.65.0.5".parse().unwrap();
        AddressReport { ip, prefix: None, pool: Some("main".into()), reserved_by: vec![], quarantined: None, status }
    }

    #[test]
    fn texts_are_calicoctls() {
        assert_eq!(report(Status::Free).text(), "10.65.0.5 is not assigned");
        let attributes: BTreeMap<_, _> =
            [("pod", "web"), ("node", "node1")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let holder = Holder { handle: Some("net1.c1".into()), attributes, ..Holder::default() };
        assert_eq!(
            report(Status::Held(holder)).text(),
            "IP 10.65.0.5 is in use\nHandle ID: net1.c1\nActive Owner Attributes:\n  node: node1\n  pod: web\n"
        );
        assert_eq!(
            report(Status::Held(Holder::default())).text(),
            "IP 10.65.0.5 is in use\nHandle ID: <none>\nNo Active Owner attributes defined\n"
        );
    }

    #[test]
    fn json_has_the_holder_beside_the_address() {
        let base = json!({"ip": "10.65.0.5", "in_use": false, "pool": "main", "reserved_by": []});
        assert_eq!(to_value(report(Status::Free).json()).unwrap(), base);
        let held = report(Status::Held(Holder { handle: Some("h".into()), ..Holder::default() }));
        let held = to_value(held.json()).unwrap();
        assert_eq!(held["in_use"], true);
        assert_eq!((&held["handle"], &held["attributes"]), (&json!("h"), &json!({})));
        let at = "2026-11-21T10:00:00Z";
        let cooling = to_value(report(Status::CoolingDown { released_at: Some(at.into()) }).json()).unwrap();
        assert_eq!((&cooling["in_use"], &cooling["cooling_down_since"]), (&json!(false), &json!(at)));
    }
}
