//! What the pods have in the store and on the machine, and what is left when they are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::Value;

use crate::cluster::Cluster;
use crate::pods::Pod;

/// What the machine has apart from pods: interfaces, routes, network namespaces and firewall rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remains {
    interfaces: BTreeSet<String>,
    routes: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    rules: BTreeSet<String>,
}

impl Cluster {
    /// Returns the addresses in use according to Margay, each with the pod (`NAMESPACE/NAME`) that has it.
    pub(crate) fn assigned(&self) -> Result<BTreeMap<IpAddr, String>, String> {
        let report = self.margay(&["ipam", "check", "--show-all-ips"])?;
        let (mut assigned, mut in_use) = (BTreeMap::new(), 0);
        for entry in report["addresses"].as_array().ok_or_else(|| format!("no addresses in {report}"))? {
            let address = entry["ip"].as_str().and_then(|ip| ip.parse().ok()).ok_or_else(|| entry.to_string())?;
            let owner = &entry["attributes"];
            // On Calico's kind of network the attributes have Calico's names, on others Margay's.
            let named = |name: &str| owner[name].as_str().or_else(|| owner[format!("margay.io/{name}")].as_str());
            let text = |name: &str| named(name).unwrap_or("-").to_owned();
            in_use += u64::from(entry["state"] == "in use");
            // A sticky address that waits for its workload is in use and has no handle.
            if entry["state"] != "cooling down" && !entry["handle"].is_null() {
                assigned.insert(address, format!("{}/{}", text("namespace"), text("pod")));
            }
        }
        let shown = self.margay(&["ipam", "show"])?;
        let pools = shown["pools"].as_array().into_iter().flatten();
        let sum: u64 = pools.filter_map(|pool| pool["in_use"].as_str()?.parse::<u64>().ok()).sum();
        if sum != in_use {
            return Err(format!("of {in_use} addresses in use margay ipam show counts {sum}"));
        }
        Ok(assigned)
    }

    /// Compares the addresses of pods in the API with those in Margay's store.
    pub(crate) fn compare_addresses(&self, pods: &[Pod]) -> Result<(), String> {
        let mut shown = BTreeMap::new();
        for pod in pods {
            for &address in &pod.addresses {
                if let Some(other) = shown.insert(address, format!("{}/{}", pod.namespace, pod.name)) {
                    return Err(format!("{address} is {}'s and {other}'s", pod.name));
                }
            }
        }
        if !self.setup.is_margay() {
            return Ok(());
        }
        let assigned = self.assigned()?;
        if assigned == shown {
            return Ok(());
        }
        let only = |of: &BTreeMap<IpAddr, String>, other: &BTreeMap<IpAddr, String>| {
            of.iter().filter(|(ip, pod)| other.get(*ip) != Some(pod)).map(|(ip, pod)| format!("{ip} {pod}")).collect()
        };
        let (of_api, of_margay): (Vec<_>, Vec<_>) = (only(&shown, &assigned), only(&assigned, &shown));
        Err(format!("only the API shows {of_api:?}, only Margay {of_margay:?}"))
    }

    /// Removes the network namespaces without any interface but the loopback interface, and files that no namespace was
    /// mounted on, and returns how many there were. No pod may be left.
    #[track_caller]
    pub(crate) fn remove_empty_namespaces(&self) -> usize {
        let is_empty = |path: &&str| {
            if self.attempt(&["mountpoint", "--quiet", path]).is_err() {
                return true;
            }
            let links = self.run(&["nsenter", &format!("--net={path}"), "ip", "-brief", "link"]);
            links.lines().all(|link| link.starts_with("lo "))
        };
        let found = self.run(&["find", "/run/netns", "-type", "f"]);
        let empty: Vec<&str> = found.lines().filter(is_empty).collect();
        for path in &empty {
            self.run(&["sh", "-c", "mountpoint --quiet $0 && umount $0; rm $0", path]);
        }
        empty.len()
    }

    #[track_caller]
    pub(crate) fn remains(&self) -> Remains {
        let lines = |text: String| -> BTreeSet<String> { text.lines().map(str::to_owned).collect() };
        let links: Value = serde_json::from_str(&self.run(&["ip", "-json", "link"])).unwrap();
        let links = links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap().to_owned());
        let mut rules = BTreeSet::new();
        for save in ["iptables-save", "ip6tables-save"] {
            // The portmap plugin and the kubelet keep chains and rules that all pods share.
            let of_pods = |line: &&str| line.contains("CNI-DN-") || line.contains("CNI-SN-");
            rules.extend(self.run(&[save]).lines().filter(of_pods).map(str::to_owned));
        }
        let mut routes = lines(self.run(&["ip", "route"]));
        routes.extend(lines(self.run(&["ip", "-6", "route", "show", "type", "unicast"])));
        Remains {
            // The bridge plugin keeps its bridges.
            interfaces: links.filter(|name| !name.starts_with("cni-")).collect(),
            routes: routes.into_iter().filter(|route| !route.contains("dev cni-")).collect(),
            namespaces: lines(self.run(&["find", "/run/netns", "-type", "f"])),
            rules,
        }
    }

    /// Checks that pods that are gone have left no address, handle, endpoint, interface, route, firewall rule or network
    /// namespace.
    pub(crate) fn nothing_is_left(&self, before: &Remains) -> Result<(), String> {
        let after = self.remains();
        if after != *before {
            return Err(format!("the machine is not as before: {before:?} {after:?}"));
        }
        if !self.setup.is_margay() {
            return Ok(());
        }
        let assigned = self.assigned()?;
        if !assigned.is_empty() {
            return Err(format!("addresses are left: {assigned:?}"));
        }
        let report = self.margay(&["ipam", "check"])?;
        for count in ["handles", "endpoints"] {
            if report["counts"][count] != 0 {
                return Err(format!("{count} are left: {}", report["counts"]));
            }
        }
        match report["problems"].as_u64() {
            Some(0) => Ok(()),
            _ => Err(format!("margay ipam check: {report}")),
        }
    }
}
