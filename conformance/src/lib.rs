//! The rules of kv/SEMANTICS.md as cases: judge any KV-with-revisions store.
