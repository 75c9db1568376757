//! The stores of a collection.

use std::io::Write;

use datastore::{Chosen, Environment, Location, Source, all_for_operator};

use crate::args::{Cli, Gc};
use crate::error::Result;
use crate::store;

/// The stores of a collection.
pub(super) enum Stores {
    /// These stores, at least one.
    These(Vec<Chosen>),
    /// No store, for this reason.
    None(String),
}

/// Chooses the stores.
///
/// For the systemd units a machine without a network of ours is no error. Nor is a machine that has only stores of
/// clusters, for the unit that runs before there is a network.
pub(super) fn choose(cli: &Cli, args: &Gc, env: &Environment<'_>, err: &mut dyn Write) -> Result<Stores> {
    if !args.all_stores && !args.local_stores {
        return Ok(Stores::These(vec![store::choose(cli, env, err)?]));
    }
    let mut stores = all_for_operator(env, &cli.cni_conf_dir)?;
    for chosen in &stores {
        for problem in &chosen.unreadable {
            _ = writeln!(err, "warning: skipped {problem}");
        }
        if chosen.source == Source::Default {
            if chosen.location.path().is_none_or(|path| !path.exists()) {
                let folder = cli.cni_conf_dir.display();
                return Ok(Stores::None(format!(
                    "no network in {folder} takes its addresses from Margay; nothing to free"
                )));
            }
            _ = writeln!(err, "store: {} ({})", chosen.location, chosen.source);
        }
    }
    if args.local_stores {
        stores.retain(|chosen| !matches!(chosen.location, Location::Etcd(_)));
    }
    Ok(match stores.is_empty() {
        true => Stores::None("all stores are clusters'; margay-gc.timer goes through them".to_owned()),
        false => Stores::These(stores),
    })
}
