//! Tests releases of addresses of virtual machines.

use ipam_core::assign::{AssignRequest, RequestedAddresses};
use ipam_core::model::ReleaseRequest;
use ipam_core::vm::{PodRole, VmAnswer, VmFate, VmPod};

use crate::Operated;
use crate::world::{World, attachment, soon};

#[tokio::test]
async fn machine_addresses_are_not_reclaimed() {
    let world = World::new().await;
    world.add_pool("v4", "10.0.0.0/28").await;
    world.add_pool("v6", "fd00::/124").await;
    let pod = VmPod {
        handle: "net.vmi.shop.cart".into(),
        namespace: "shop".into(),
        name: "source".into(),
        role: PodRole::Source,
        fate: VmFate::Stays,
        attributes: [("vmi-name".to_owned(), "cart".to_owned())].into(),
    };
    let request = AssignRequest::new(attachment("a", "source"), RequestedAddresses::any(1, 1));
    let VmAnswer::First(held) = world.ipam.assign_to_vm(&request, &pod, soon()).await.unwrap() else {
        panic!("the machine has addresses already");
    };
    for what in ["running", "stopped"] {
        for ip in held.iter().map(|one| one.ip) {
            let entry = world.ipam.attributes_of(ip, soon()).await.unwrap();
            let request = ReleaseRequest::new(ip).with_handle(entry.handle().unwrap());
            let done = world.operator().reclaim(&[request], soon()).await.unwrap();
            assert_eq!((done.released, done.changed), (vec![], vec![ip]), "{what}");
        }
        world.ipam.release_vm_pod(&pod, &attachment("a", "source"), &[], &[], soon()).await.unwrap();
    }
}
