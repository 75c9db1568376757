//! The IPAM data model and the allocator; speaks kv and nothing else.
