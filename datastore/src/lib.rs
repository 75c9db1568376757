//! Which store: from NetConf, environment, file or URL to an open store.
