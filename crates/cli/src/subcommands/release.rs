//! Releases addresses, for the command `margay ipam release`. With `--from-report`, the command releases those
//! addresses and handles that all given check reports list as unused.
//!
//! calicoctl releases addresses from check reports only if the datastore is locked. margay needs no lock, because the
//! handle and the sequence number guard each release. The release fails if the address was assigned or released after
//! the check reports were made.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use clap::{ArgGroup, Args};
use ipam_core::Error;
use ipam_core::model::ReleaseRequest;
use ipam_operator::Operator;
use ipam_operator::inspect::{AddressReporting, HandleRevision};
use kv::{Deadline, Revision};
use serde::Serialize;

use super::check::{CheckReport, LeakedHandle, ReportedAddress, StoreInspection, guid, inspect, revision};
use crate::command::{CommandAnswer, OpenStoreCommand, StoreCommand};
use crate::error::{CommandFailure, CommandResult};
use crate::output::printable;
use crate::store::{StoreAccess, StoreUse};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("what").required(true))]
pub(crate) struct Release {
    /// Release this address
    #[arg(long, value_name = "ADDRESS", group = "what")]
    pub(crate) ip: Option<IpAddr>,

    /// Release all addresses of this handle (printed by margay ipam show --ip)
    #[arg(long, value_name = "HANDLE", group = "what")]
    pub(crate) handle: Option<String>,

    /// Release all addresses of this container, in every network
    #[arg(long, value_name = "ID", group = "what")]
    pub(crate) container: Option<String>,

    /// Release the addresses that every given report lists as unused (reports of `margay ipam check`)
    #[arg(long, value_name = "FILE", group = "what", num_args = 1..)]
    pub(crate) from_report: Vec<PathBuf>,

    /// Release even if Calico's ClusterInformation has changed since the reports were written
    #[arg(long, requires = "from_report")]
    pub(crate) force: bool,

    /// Show what would be released, and release nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Serialize)]
struct ReleasedJson<'a> {
    released: &'a [IpAddr],
}

#[async_trait(?Send)]
impl OpenStoreCommand for Release {
    fn store_use(&self) -> StoreUse {
        StoreUse::Release
    }

    fn dry_run(&self) -> bool {
        self.dry_run
    }

    async fn run(&self, operator: &Operator, deadline: Deadline) -> CommandResult<CommandAnswer> {
        if let Some(ip) = self.ip {
            return release_address(operator, ip, deadline).await;
        }
        if let Some(handle) = &self.handle {
            let released = operator.ipam().release_by_handle(handle, deadline).await;
            return released_answer(
                &released.map_err(|error| unknown_holder_failure(error, "handle", handle))?,
                &format!("handle {handle}"),
            );
        }
        let container = self.container.as_deref().unwrap_or_default();
        let released = operator.ipam().release_by_container(container, deadline).await.map_err(|error| {
            unknown_holder_failure(error, "container", container).hint(
                "Calico stores the container ID only in the handle; for addresses that Calico assigned, use --handle \
                 NETWORK.CONTAINER",
            )
        });
        released_answer(&released?, &format!("container {container}"))
    }
}

async fn release_address(operator: &Operator, ip: IpAddr, deadline: Deadline) -> CommandResult<CommandAnswer> {
    let done = operator.ipam().release_ips(&[ReleaseRequest::new(ip)], deadline).await?;
    if done.released.is_empty() {
        return Err(CommandFailure::new(format!("IP address {ip} is not assigned")));
    }
    CommandAnswer::new(format!("Successfully released IP address {ip}"), &ReleasedJson { released: &done.released })
}

fn released_answer(released: &[IpAddr], whose: &str) -> CommandResult<CommandAnswer> {
    let lines: Vec<String> = released.iter().map(|ip| format!("Successfully released IP address {ip}")).collect();
    let answer = CommandAnswer::new(lines.join("\n"), &ReleasedJson { released })?;
    Ok(if released.is_empty() { answer.note(format!("{whose} was on record, but held no address")) } else { answer })
}

fn unknown_holder_failure(error: Error, kind: &str, name: &str) -> CommandFailure {
    match error {
        Error::NotFound { .. } => CommandFailure::new(format!("no IP address is assigned to {kind} {name}")),
        other => other.into(),
    }
}

/// Time limit for all releases between opening the store and closing it again.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of addresses or handles that are released before the store is closed for a moment.
const MAX_RELEASES_PER_OPENING: usize = 256;

#[derive(Default, Serialize)]
struct FromReportJson {
    dry_run: bool,
    released: Vec<IpAddr>,
    changed: Vec<IpAddr>,
    released_handles: Vec<String>,
    changed_handles: Vec<String>,
}

/// With `--from-report`, releases those addresses and handles that all check reports list as unused.
#[async_trait(?Send)]
impl StoreCommand for Release {
    fn progress_text(&self) -> Option<&'static str> {
        Some("working on")
    }

    async fn run(&self, at: StoreAccess<'_>) -> CommandResult<CommandAnswer> {
        let reports: Vec<CheckReport> =
            self.from_report.iter().map(|path| CheckReport::read(path)).collect::<CommandResult<_>>()?;
        let current = inspect(at, AddressReporting::Findings).await?;
        require_same_cluster(&self.from_report, &reports, &current)?;
        if !self.force {
            require_current(&reports, &current)?;
        }
        let (addresses, handles) = (agreed_addresses(&reports), agreed_handles(&reports));
        let mut done = FromReportJson { dry_run: self.dry_run, ..FromReportJson::default() };
        if self.dry_run {
            done.released = addresses.iter().map(|request| request.address).collect();
            done.released_handles = handles.into_iter().map(|handle| handle.id).collect();
            return from_report_answer(&done);
        }
        for some in addresses.chunks(MAX_RELEASES_PER_OPENING) {
            let reclaim =
                async |operator: &Operator| Ok(operator.reclaim(some, Deadline::after(RELEASE_TIMEOUT)).await?);
            let reclaimed = at.with_operator(StoreUse::Release, reclaim).await?;
            done.released.extend(reclaimed.released);
            done.changed.extend(reclaimed.changed);
        }
        for some in handles.chunks(MAX_RELEASES_PER_OPENING) {
            let reclaim = async |operator: &Operator| {
                Ok(operator.reclaim_handles(some, Deadline::after(RELEASE_TIMEOUT)).await?)
            };
            let gone = at.with_operator(StoreUse::Release, reclaim).await?;
            let kept = some.iter().map(|handle| &handle.id).filter(|id| !gone.contains(id)).cloned();
            done.changed_handles.extend(kept);
            done.released_handles.extend(gone);
        }
        from_report_answer(&done)
    }
}

/// Refuses check reports that were made from another cluster.
fn require_same_cluster(paths: &[PathBuf], reports: &[CheckReport], current: &StoreInspection) -> CommandResult<()> {
    let wanted = guid(current);
    for (path, report) in paths.iter().zip(reports) {
        if report.cluster_guid != wanted {
            return Err(CommandFailure::new(format!(
                "{} is about cluster {}, and this is {}",
                path.display(),
                printable(&report.cluster_guid),
                printable(wanted)
            ))
            .hint("use only reports that margay ipam check has written about this store"));
        }
    }
    Ok(())
}

/// Refuses the check reports if Calico's ClusterInformation has changed since the newest report was made.
fn require_current(reports: &[CheckReport], current: &StoreInspection) -> CommandResult<()> {
    let wanted = revision(&current.inspection);
    if wanted.is_empty() || reports.iter().any(|report| report.cluster_information_revision == wanted) {
        return Ok(());
    }
    Err(CommandFailure::new("Calico's ClusterInformation was changed after all of these reports were made").hint(
        "write a new report with: margay ipam check --report FILE; or add --force to use the old reports; \
         addresses that have changed since then are not released",
    ))
}

/// Returns the addresses that all check reports list as unused, with the same handle and sequence number in each
/// report.
fn agreed_addresses(reports: &[CheckReport]) -> Vec<ReleaseRequest> {
    let leaked = |report: &CheckReport| -> BTreeSet<(IpAddr, String, u64)> {
        let rows = report.allocations.iter().flat_map(|(ip, rows)| rows.iter().map(move |row| (*ip, row)));
        let free = rows.filter(|(_, row): &(IpAddr, &ReportedAddress)| !row.in_use && !row.cooling_down);
        // Without a sequence number, Margay could not detect that the address was assigned again after the check
        // report.
        free.filter_map(|(ip, row)| Some((ip, row.handle.clone(), row.sequence_number?))).collect()
    };
    let mut sets = reports.iter().map(leaked);
    let Some(mut common) = sets.next() else { return Vec::new() };
    for other in sets {
        common.retain(|one| other.contains(one));
    }
    let request = |(ip, handle, number): (IpAddr, String, u64)| {
        ReleaseRequest::new(ip).with_handle(handle).with_sequence_number(number)
    };
    common.into_iter().map(request).collect()
}

/// Returns the handles that hold no address according to every check report, and that were not written between the
/// reports.
fn agreed_handles(reports: &[CheckReport]) -> Vec<HandleRevision> {
    let Some((first, others)) = reports.split_first() else { return Vec::new() };
    let mut common = first.leaked_handles.clone();
    common.retain(|handle| others.iter().all(|report| report.leaked_handles.contains(handle)));
    common.sort();
    let read = |handle: LeakedHandle| {
        let revision = Revision::new(handle.revision.parse().ok()?);
        Some(HandleRevision { id: handle.id, revision })
    };
    common.into_iter().filter_map(read).collect()
}

fn from_report_answer(done: &FromReportJson) -> CommandResult<CommandAnswer> {
    let verb = if done.dry_run { "Would release" } else { "Successfully released" };
    let mut lines: Vec<String> = done.released.iter().map(|ip| format!("{verb} IP address {ip}")).collect();
    lines.extend(done.released_handles.iter().map(|id| format!("{verb} handle {}", printable(id))));
    let left_alone = |ip| format!("Left IP address {ip} alone: it has changed since, or waits for its workload");
    lines.extend(done.changed.iter().map(left_alone));
    let left =
        done.changed_handles.iter().map(|id| format!("Left handle {} alone: it has changed since", printable(id)));
    lines.extend(left);
    let answer = CommandAnswer::new(lines.join("\n"), done)?;
    Ok(if lines.is_empty() { answer.note("no address or handle is unused in all reports") } else { answer })
}
