//! The commands.

mod address;
mod borrowed;
mod check;
mod documents;
mod explain;
mod forecast;
mod from_report;
mod history;
mod map;
mod metrics;
mod moving;
mod pool;
mod quarantine;
mod quota;
mod release;
mod reservation;
mod settings;
mod show;
mod split;
mod sticky;
mod store;

use crate::args::{
    Command, Documents, Import, Ipam, Moving, Pool, Quarantine, Quota, Release, Reservation, Show, StoreVerb, TakeOver,
};
use crate::command::Task::{self, OnOpenStore, OnStore, Standalone};

/// The command that the arguments name.
pub(crate) fn task(command: &Command) -> Task<'_> {
    match command {
        Command::Pool(Pool::Create(create)) if create.auto.is_some() => OnStore(create),
        Command::Pool(Pool::Create(create)) => OnOpenStore(create),
        Command::Pool(Pool::List) => OnOpenStore(&pool::List),
        Command::Pool(Pool::Delete(delete)) => OnOpenStore(delete),
        Command::Reservation(Reservation::Create(create)) => OnOpenStore(create),
        Command::Reservation(Reservation::List) => OnOpenStore(&reservation::List),
        Command::Reservation(Reservation::Delete(delete)) => OnOpenStore(delete),
        Command::Quota(Quota::Set(set)) => OnOpenStore(set),
        Command::Quota(Quota::List) => OnOpenStore(&quota::List),
        Command::Quota(Quota::Delete(delete)) => OnOpenStore(delete),
        Command::Ipam(operator) => of_ipam(operator),
        Command::Metrics(metrics) => OnStore(metrics),
        Command::Moving(Moving::Export(export)) => OnStore(export),
        Command::Moving(Moving::Import(Import { of: Some(of), .. })) => match of {
            TakeOver::HostLocal(from) => Standalone(from),
            TakeOver::Podman(from) => Standalone(from),
            TakeOver::Whereabouts(from) => Standalone(from),
        },
        Command::Moving(Moving::Import(import)) => OnStore(import),
        Command::Moving(Moving::Migrate(migrate)) => Standalone(migrate),
        Command::Documents(documents) => match documents {
            Documents::Get(get) => OnStore(get),
            Documents::Create(create) => OnStore(create),
            Documents::Apply(apply) => OnStore(apply),
            Documents::Replace(replace) => OnStore(replace),
            Documents::Delete(delete) => OnStore(delete),
        },
        Command::Gc(gc) => Standalone(gc),
        Command::Watch(watch) => Standalone(watch),
        Command::Serve(serve) => Standalone(serve),
        Command::Store(verb) => match verb {
            StoreVerb::Status => OnStore(&store::Status),
            StoreVerb::Verify => OnStore(&store::Verify),
            StoreVerb::Backup(backup) => OnStore(backup),
            StoreVerb::Restore(restore) => OnStore(restore),
            StoreVerb::Compact(compact) => OnStore(compact),
            StoreVerb::Upgrade(upgrade) => OnStore(upgrade),
            StoreVerb::Create(create) => OnStore(create),
        },
        Command::Install(install) => Standalone(install),
        Command::Conformance(conformance) => Standalone(conformance),
        Command::Completions(completions) => Standalone(completions),
        Command::ManPages(pages) => Standalone(pages),
    }
}

fn of_ipam(command: &Ipam) -> Task<'_> {
    match command {
        Ipam::Show(Show { forecast: true, .. }) => OnStore(&forecast::Show),
        Ipam::Show(show) => OnOpenStore(show),
        Ipam::Map(map) => OnOpenStore(map),
        Ipam::Check(check) => OnStore(check),
        Ipam::Release(release @ Release { from_report, .. }) if !from_report.is_empty() => OnStore(release),
        Ipam::Release(release) => OnOpenStore(release),
        Ipam::Quarantine(Quarantine::List) => OnOpenStore(&quarantine::List),
        Ipam::Quarantine(Quarantine::Release(release)) => OnOpenStore(release),
        Ipam::Configure(configure) => OnOpenStore(configure),
        Ipam::Split(split) => OnOpenStore(split),
        Ipam::History(history) => OnStore(history),
        Ipam::Explain(explain) => OnOpenStore(explain),
        Ipam::AssignPrefix(assign) => OnOpenStore(assign),
        Ipam::Pin(pin) => OnOpenStore(pin),
        Ipam::Unpin(unpin) => OnOpenStore(unpin),
        Ipam::List(list) => OnOpenStore(list),
    }
}
