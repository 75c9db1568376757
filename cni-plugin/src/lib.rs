//! The CNI protocol and the plugin margay-ipam.
