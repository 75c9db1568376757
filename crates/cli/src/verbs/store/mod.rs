//! The verbs that look after a store as a whole.

mod backup;
mod compact;
mod create;
mod restore;
mod status;
mod upgrade;
mod verify;

use clap::Subcommand;

use backup::Backup;
use compact::Compact;
use create::CreateStore;
use restore::Restore;
pub(crate) use status::Status;
use upgrade::Upgrade;
pub(crate) use verify::Verify;

/// Looking after a store as a whole.
#[derive(Debug, Subcommand)]
pub(crate) enum StoreVerb {
    /// Show the store's engine and size, the revisions that can be read, and the process that has it now
    #[command(after_help = "\
Examples:
  margay store status
  margay store status -o json | jq .history

A store that is in use for longer than 2 seconds, or that cannot be opened, is shown
as far as it can be seen from outside; the exit code is then 1.")]
    Status,
    /// Read every row of the store and check that it is whole
    #[command(after_help = "\
Examples:
  margay store verify
  margay store verify --store redb:///var/lib/margay/ipam.redb

Others wait for their turn until it is done. Damage is told with what to do; the exit code is then 1.")]
    Verify,
    /// Write the store, as it is at one revision, to a file
    #[command(after_help = "\
Examples:
  margay store backup /var/backups/margay-$(date +%F).jsonl
  margay store backup --force /var/backups/margay.jsonl

Containers can be started and stopped meanwhile: the store is released while another process waits for it.
The file is JSON lines with a checksum, and only its owner can read it.
Of an etcd the keys below /calico/ and /margay/ are written.")]
    Backup(Backup),
    /// Make a store from a backup, whatever the backup was made from
    #[command(after_help = "\
Examples:
  margay store restore /var/backups/margay.jsonl
  margay store restore /var/backups/margay.jsonl --replace --dry-run
  margay store restore /var/backups/margay.jsonl --store redb:///var/lib/margay/ipam.redb

The backup is checked first. The store is there in full or not at all. Addresses that were assigned
after the backup was made are unknown to it: start the containers anew that are younger.")]
    Restore(Restore),
    /// Give up history and, where the engine can, the room that is not needed
    #[command(after_help = "\
Examples:
  margay store compact
  margay store compact --keep 1000 --dry-run

What is in the store now is not touched.")]
    Compact(Compact),
    /// Raise the store to the newest format, 2, which keeps the leases of etcd's API
    #[command(after_help = "\
Examples:
  margay store upgrade
  margay store upgrade --dry-run

A version of margay that does not know the newest format cannot open the store any more, and there is no way back but
a backup. So the command refuses while a plugin of such a version is in a folder for CNI plugins.")]
    Upgrade(Upgrade),
    /// Make an empty store
    #[command(after_help = "\
Examples:
  margay store create --store redb:///var/lib/margay/ipam.redb
  margay store create --format 2

The first pool makes the store, too, in format 1. Format 2 keeps the leases of etcd's API (margay serve --listen).")]
    Create(CreateStore),
}
