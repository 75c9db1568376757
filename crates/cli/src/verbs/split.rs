//! Dividing a pool.

use async_trait::async_trait;
use ipam_core::Error;
use ipam_operator::{Operator, Which};
use kv::Deadline;
use serde_json::json;

use crate::answer::Answer;
use crate::args::Split;
use crate::command::OnOpenStore;
use crate::error::{Failure, Result};
use crate::store::Need;

#[async_trait(?Send)]
impl OnOpenStore for Split {
    fn need(&self) -> Need {
        Need::Write
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> Result<Answer> {
        // The parser ensures that one of the two is given.
        let which = match (&self.name, self.cidr) {
            (Some(name), _) => Which::Name(name),
            (None, Some(cidr)) => Which::Cidr(cidr),
            (None, None) => return Err(Failure::new("no name or CIDR provided")),
        };
        let split = operator.split_pool(which, self.number, deadline).await.map_err(|error| match error {
            Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay get ippool"),
            _ => error.into(),
        })?;
        let (first, made) = if self.dry_run {
            (
                format!("Dry run: IP Pool {} would be split into {} smaller pools.", split.pool, self.number),
                "Would create",
            )
        } else {
            (format!("IP Pool {} was successfully split into {} smaller pools.", split.pool, self.number), "Created")
        };
        let lines = split.parts.iter().map(|(name, cidr)| format!("{made} {name} with CIDR {cidr}."));
        let text: Vec<String> = std::iter::once(first).chain(lines).collect();
        let parts: Vec<_> =
            split.parts.iter().map(|(name, cidr)| json!({ "name": name, "cidr": cidr.to_string() })).collect();
        let json = json!({ "pool": split.pool, "parts": parts, "dry_run": self.dry_run });
        Answer::new(text.join("\n"), &json)
    }
}
