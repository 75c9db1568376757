//! The stores of a collection.

use datastore::{Chosen, Source, all_for_operator};

use super::args::Gc;
use crate::command::Call;
use crate::error::Result;

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
pub(super) fn choose(args: &Gc, call: &mut Call<'_>) -> Result<Stores> {
    if !args.all_stores && !args.local_stores {
        return Ok(Stores::These(vec![call.choose()?]));
    }
    let stores = all_for_operator(call.drivers, call.env, &call.options.cni_conf_dir);
    let mut stores = stores.map_err(|error| call.explain(&error))?;
    for chosen in &stores {
        for problem in &chosen.unreadable {
            _ = writeln!(call.err, "warning: skipped {problem}");
        }
        if chosen.source == Source::Default {
            if chosen.location.path().is_none_or(|path| !path.exists()) {
                let folder = call.options.cni_conf_dir.display();
                return Ok(Stores::None(format!(
                    "no network in {folder} takes its addresses from Margay; nothing to free"
                )));
            }
            _ = writeln!(call.err, "store: {} ({})", chosen.location, chosen.source);
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
