//! The rules of this machine for pools with `natOutgoing`, after a change of pools.
//!
//! The plugin makes them when a container starts, from the pools of its store. A pool that is deleted or changed here
//! would keep its rules until the next container starts. So the command refreshes them: on a machine that has such
//! rules, and for a store of one machine.

use datastore::{Location, served};
use ipam_core::model::Pool;
use ipam_operator::Operator;
use ipnet::IpNet;
use kv::Deadline;
use wiring::masquerade;

use crate::answer::Answer;
use crate::error::Result;

/// Does work that may change pools. If the networks of pools have changed, the rules are refreshed. If that fails, the
/// answer gets a note: the pools are changed all the same.
///
/// # Errors
/// Those of the work.
pub(crate) async fn follow(
    operator: &Operator,
    location: &Location,
    deadline: Deadline,
    work: impl Future<Output = Result<Answer>>,
) -> Result<Answer> {
    let before = Networks::read(operator, deadline).await;
    let answer = work.await?;
    let after = Networks::read(operator, deadline).await;
    let (Some(before), Some(after)) = (before, after) else { return Ok(answer) };
    if before == after || (before.masqueraded.is_empty() && after.masqueraded.is_empty()) {
        return Ok(answer);
    }
    let store = served::instance(location).unwrap_or_default();
    Ok(match masquerade::refresh(&store, &after.masqueraded, &after.all) {
        Ok(()) => answer,
        Err(error) => answer.note(format!(
            "the rules of this machine for pools with natOutgoing stay as they are until the next container starts: {error}"
        )),
    })
}

/// The networks of the pools of a store.
#[derive(Debug, PartialEq, Eq)]
struct Networks {
    masqueraded: Vec<IpNet>,
    all: Vec<IpNet>,
}

impl Networks {
    /// Reads them; `None` if the store cannot be read, which the work reports by itself.
    async fn read(operator: &Operator, deadline: Deadline) -> Option<Self> {
        let pools = operator.ipam().inventory(deadline).await.ok()?.pools;
        let masqueraded = pools.iter().filter(|pool| pool.is_nat_outgoing()).map(Pool::cidr).collect();
        Some(Self { masqueraded, all: pools.iter().map(Pool::cidr).collect() })
    }
}
