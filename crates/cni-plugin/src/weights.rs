//! The weights of a network's pools: how often each of them comes first.

use std::collections::BTreeMap;

use agent::{CniError, Result};
use ipam_core::pools::start_of;

use crate::gojson::{Json, quoted};
use crate::netconf::NetConf;
use crate::network::OwnPool;

/// The weight of each pool, by its entry in `ipv4_pools` or `ipv6_pools`, or by its subnet.
pub(crate) type Weights = BTreeMap<String, u32>;

/// Reads `ipam.weights`.
///
/// # Errors
/// Code 7 for a weight that is none, and for a pool that the network does not have.
pub(crate) fn read(conf: &NetConf, own_pools: &[OwnPool]) -> Result<Weights> {
    let wrong = || CniError::config("ipam.weights must be an object with a whole number for each pool");
    let members = match &conf.ipam.weights {
        None => return Ok(Weights::new()),
        Some(Json::Object(members)) => members,
        Some(_) => return Err(wrong()),
    };
    let named = || conf.ipam.ipv4_pools.iter().chain(&conf.ipam.ipv6_pools);
    let weight = |(name, weight): &(String, Json)| {
        let is_there = named().any(|pool| pool == name) || own_pools.iter().any(|pool| pool.text() == *name);
        if !is_there {
            let message = format!("ipam.weights has {}, which is no pool of the network", quoted(name));
            return Err(
                CniError::config(message).with_details("name the pools as in ipv4_pools and ipv6_pools, or by subnet")
            );
        }
        let Json::Number(number) = weight else { return Err(wrong()) };
        let number = number.as_u64().and_then(|number| u32::try_from(number).ok()).ok_or_else(wrong)?;
        Ok((name.clone(), number))
    };
    members.iter().map(weight).collect()
}

/// Puts one of the pools first, always the same one for a container; over many containers each comes first as often as
/// its weight says. The order of the others stays. A pool without a weight has the weight 1.
pub(crate) fn choose_first<T>(weights: &Weights, container: &str, pools: &mut [T], name: impl Fn(&T) -> String) {
    if weights.is_empty() {
        return;
    }
    let each: Vec<u64> =
        pools.iter().map(|pool| weights.get(&name(pool)).map_or(1, |weight| (*weight).into())).collect();
    // Container ids that differ in a digit at the end get distant numbers.
    let number = start_of(container).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let Some(mut place) = number.checked_rem(each.iter().sum()) else { return };
    for (index, weight) in each.into_iter().enumerate() {
        match place.checked_sub(weight) {
            Some(rest) => place = rest,
            None => return pools.get_mut(..=index).unwrap_or_default().rotate_right(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(weights: &[(&str, u32)]) -> BTreeMap<String, usize> {
        let weights = weights.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect();
        let mut counted = BTreeMap::new();
        for number in 0..4000 {
            let mut pools = ["a", "b", "c"].map(str::to_owned);
            choose_first(&weights, &format!("container-{number}"), &mut pools, Clone::clone);
            *counted.entry(pools.concat()).or_default() += 1;
        }
        counted
    }

    #[test]
    fn each_comes_first_as_often_as_its_weight_says() {
        assert_eq!(orders(&[]), [("abc".to_owned(), 4000)].into());
        let counted = orders(&[("a", 3), ("c", 0)]);
        assert_eq!(counted.keys().collect::<Vec<_>>(), ["abc", "bac"]);
        assert!((2850..3150).contains(&counted["abc"]), "{counted:?}");
        let counted = orders(&[("a", 1), ("b", 1), ("c", 2)]);
        assert_eq!(counted.keys().collect::<Vec<_>>(), ["abc", "bac", "cab"]);
        assert!((1850..2150).contains(&counted["cab"]), "{counted:?}");
        assert_eq!(orders(&[("a", 0), ("b", 0), ("c", 0)]).len(), 1);
    }

    #[test]
    fn a_container_always_has_the_same() {
        let weights = [("a".to_owned(), 1)].into();
        let order = || {
            let mut pools = ["a", "b"].map(str::to_owned);
            choose_first(&weights, "0f3a", &mut pools, Clone::clone);
            pools
        };
        assert_eq!(order(), order());
    }
}
