//! Dividing a pool.

use ipam_core::Error;
use ipam_operator::{Operator, Which};
use kv::Deadline;
use serde_json::json;

use crate::answer::Answer;
use crate::args::Split;
use crate::error::{Failure, Result};

/// Divides a pool into pools of equal size.
pub(super) async fn run(ipam: &Operator, args: &Split, deadline: Deadline) -> Result<Answer> {
    // The parser ensures that one of the two is given.
    let which = match (&args.name, args.cidr) {
        (Some(name), _) => Which::Name(name),
        (None, Some(cidr)) => Which::Cidr(cidr),
        (None, None) => return Err(Failure::new("no name or CIDR provided")),
    };
    let split = ipam.split_pool(which, args.number, deadline).await.map_err(|error| match error {
        Error::NotFound { .. } => Failure::from(error).hint("see which there are with: margay get ippool"),
        _ => error.into(),
    })?;
    let (first, made) = if args.dry_run {
        (format!("Dry run: IP Pool {} would be split into {} smaller pools.", split.pool, args.number), "Would create")
    } else {
        (format!("IP Pool {} was successfully split into {} smaller pools.", split.pool, args.number), "Created")
    };
    let lines = split.parts.iter().map(|(name, cidr)| format!("{made} {name} with CIDR {cidr}."));
    let text: Vec<String> = std::iter::once(first).chain(lines).collect();
    let parts: Vec<_> =
        split.parts.iter().map(|(name, cidr)| json!({ "name": name, "cidr": cidr.to_string() })).collect();
    let json = json!({ "pool": split.pool, "parts": parts, "dry_run": args.dry_run });
    Answer::new(text.join("\n"), &json)
}
