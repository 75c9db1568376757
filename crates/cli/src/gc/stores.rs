//! The stores of a collection.

use std::io::Write;

use datastore::{Chosen, Source, all_for_operator};

use crate::args::{Cli, Gc};
use crate::error::Result;
use crate::store::{self, Context};

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
pub(super) fn choose(cli: &Cli, args: &Gc, context: Context<'_>, err: &mut dyn Write) -> Result<Stores> {
    if !args.all_stores && !args.local_stores {
        return Ok(Stores::These(vec![store::choose(cli, context, err)?]));
    }
    let stores = all_for_operator(context.drivers, context.env, &cli.cni_conf_dir);
    let mut stores = stores.map_err(|error| context.explain(&error))?;
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
        stores.retain(|chosen| !chosen.location.is_shared());
    }
    Ok(match stores.is_empty() {
        true => Stores::None("all stores are clusters'; margay-gc.timer goes through them".to_owned()),
        false => Stores::These(stores),
    })
}
