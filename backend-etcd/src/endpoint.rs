//! One member: a connection of its own, made when it is first needed, and the token that it gave us.

use std::sync::atomic::{AtomicBool, Ordering};

use etcd_client::{Client, ConnectOptions, KvClient, WatchClient};
use tokio::sync::{Mutex, OnceCell};

use crate::error::says_no_login_needed;
use crate::options::Credentials;

/// An answer is complete however large it is; etcd bounds what it sends.
const MAX_ANSWER_BYTES: usize = usize::MAX;

/// What talks to one member. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Connection {
    client: Client,
    pub(crate) kv: KvClient,
    pub(crate) watch: WatchClient,
}

/// One member.
pub(crate) struct Endpoint {
    /// `http://host:port` or `https://host:port`.
    pub(crate) url: String,
    options: ConnectOptions,
    credentials: Option<Credentials>,
    connection: OnceCell<Connection>,
    /// True once it has answered anything.
    answered: AtomicBool,
    /// How often the token was renewed; also keeps two calls from renewing it at once.
    renewals: Mutex<u64>,
}

impl Endpoint {
    pub(crate) fn new(url: String, options: ConnectOptions, credentials: Option<Credentials>) -> Self {
        let (connection, renewals) = (OnceCell::new(), Mutex::new(0));
        Self { url, options, credentials, connection, answered: AtomicBool::new(false), renewals }
    }

    /// It has answered.
    pub(crate) fn note_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// What may be wrong, if a connection to it breaks.
    pub(crate) fn hint(&self) -> Option<&'static str> {
        match (self.answered.load(Ordering::Relaxed), self.url.starts_with("https://")) {
            (true, _) => None,
            (false, true) => Some("it never answered; it may want a certificate of ours, or be without TLS (http://)"),
            (false, false) => Some("it never answered; it may want TLS (https://)"),
        }
    }

    /// What talks to it, and how often its token was renewed so far.
    ///
    /// Nothing that was asked of the store has been sent yet when this fails: it only logs in.
    pub(crate) async fn connection(&self) -> Result<(Connection, u64), etcd_client::Error> {
        let connection = self.connection.get_or_try_init(|| self.connect()).await?.clone();
        let renewals = if self.credentials.is_some() { *self.renewals.lock().await } else { 0 };
        Ok((connection, renewals))
    }

    async fn connect(&self) -> Result<Connection, etcd_client::Error> {
        let login = self
            .credentials
            .as_ref()
            .map(|known| self.options.clone().with_user(known.user.clone(), known.password.clone()));
        let client = match login {
            None => self.connect_with(self.options.clone()).await?,
            Some(login) => match self.connect_with(login).await {
                Err(error) if says_no_login_needed(&error) => self.connect_with(self.options.clone()).await?,
                other => other?,
            },
        };
        let kv = client.kv_client().max_decoding_message_size(MAX_ANSWER_BYTES);
        let watch = client.watch_client().max_decoding_message_size(MAX_ANSWER_BYTES);
        Ok(Connection { client, kv, watch })
    }

    async fn connect_with(&self, options: ConnectOptions) -> Result<Client, etcd_client::Error> {
        Client::connect([&self.url], Some(options)).await
    }

    /// True if there is a login with which a token can be renewed.
    pub(crate) fn can_renew(&self) -> bool {
        self.credentials.is_some()
    }

    /// Gets a new token, unless that was done since `renewals` was counted.
    pub(crate) async fn renew(&self, connection: &Connection, renewals: u64) -> Result<(), etcd_client::Error> {
        let mut done = self.renewals.lock().await;
        if *done != renewals {
            return Ok(());
        }
        if let Some(known) = &self.credentials {
            // With the login, since the connection has none if nobody asked for it when it was made.
            let login = (known.user.clone(), known.password.clone());
            connection.client.clone().update_user(Some(login)).await?;
            *done += 1;
        }
        Ok(())
    }
}
