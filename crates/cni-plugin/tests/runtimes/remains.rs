//! Checks that a test machine has no leftovers of containers that are gone.

use serde_json::Value;

use crate::machine::Boot;

impl Boot<'_> {
    /// Returns how many addresses of a pool are in use, according to `margay`.
    #[track_caller]
    pub(crate) fn in_use(&self, pool: &str) -> usize {
        let shown = self.margay_json(&["ipam", "show"]);
        let pools = shown["pools"].as_array().unwrap();
        let found = pools.iter().find(|shown| shown["name"] == pool);
        let count = found.and_then(|shown| shown["in_use"].as_str()).map(str::parse);
        count.unwrap_or_else(|| panic!("no pool {pool} in {shown}")).unwrap()
    }

    /// Returns the boot id that is recorded with an address, as `margay` shows it.
    #[track_caller]
    pub(crate) fn boot_of(&self, address: &str) -> String {
        let shown = self.run(&["margay", "ipam", "show", "--ip", address]);
        let line = shown.lines().find_map(|line| line.trim().strip_prefix("margay.io/boot: "));
        line.unwrap_or_else(|| panic!("{address} has no boot: {shown}")).to_owned()
    }

    /// Returns the id of the current boot in the form in which the store records boot ids.
    pub(crate) fn recorded_id(&self) -> &str {
        &self.id[..8]
    }

    /// Checks that the machine's containers have left no address, handle, affinity without a block, interface, firewall
    /// rule or network namespace.
    #[track_caller]
    pub(crate) fn nothing_is_left(&self) {
        for pool in ["lab", "dual-v4", "dual-v6", "routed"] {
            assert_eq!(self.in_use(pool), 0, "{pool}");
        }
        self.machine.lab.nothing_is_left();
        let links: Value = serde_json::from_str(&self.run(&["ip", "-json", "link"])).unwrap();
        let names = links.as_array().unwrap().iter().map(|link| link["ifname"].as_str().unwrap());
        let others: Vec<&str> = names.filter(|name| !["lo", "lab0", "dual0"].contains(name)).collect();
        assert!(others.is_empty(), "interfaces: {others:?}");
        for save in ["iptables-save", "ip6tables-save"] {
            let rules = self.run(&[save]);
            // The portmap plugin does not remove the firewall chains that all containers share.
            let of_containers = |line: &&str| line.contains("CNI-") && !line.contains("CNI-HOSTPORT-");
            let left: Vec<&str> = rules.lines().filter(of_containers).collect();
            assert!(left.is_empty(), "{save}: {left:?}");
            assert!(!rules.contains("name: "), "{save}: {rules}");
        }
        let namespaces = self.run(&["find", "/run", "-path", "/run/netns/*"]);
        assert_eq!(namespaces, "", "namespaces");
    }
}
