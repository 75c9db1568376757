//! The only program in the containers of `make kubernetes`, so that no registry is needed.
//!
//! - `pod pause` sleeps until it gets SIGTERM.
//! - `pod serve PORT` answers HTTP requests on all addresses. `/` returns the address that the client connected to, the
//!   client's address and the host name. `/connect/ADDRESS:PORT` requests `/` from another such server.
//!
//! Called by a runtime as a CNI plugin, it runs the plugin of the same name from the folder `timed` beside it, and
//! appends verb, name and duration to the file `timed.log` there.
#![allow(clippy::print_stdout, reason = "an answer to whoever runs the program")]

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use std::{env, thread};

use signal_hook::consts::{SIGINT, SIGTERM};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

fn main() -> io::Result<ExitCode> {
    let arguments: Vec<String> = env::args().collect();
    if let Ok(verb) = env::var("CNI_COMMAND") {
        return run_timed(Path::new(&arguments[0]), &verb);
    }
    // The first process of a container ignores signals for which it has no handler.
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::new(AtomicBool::new(true)))?;
    }
    match arguments.iter().map(String::as_str).skip(1).collect::<Vec<_>>()[..] {
        ["pause"] => loop {
            thread::park();
        },
        ["serve", port] => serve(port.parse().map_err(io::Error::other)?),
        ["connect", address] => print!("{}", request(address, "/")?),
        _ => return Err(io::Error::other("usage: pod pause | serve PORT | connect ADDRESS:PORT")),
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(port: u16) {
    let addresses = [SocketAddr::from(([0; 8], port)), SocketAddr::from(([0; 4], port))];
    // The first address is for IPv6 and IPv4, unless the kernel has no IPv6.
    let listener = TcpListener::bind(&addresses[..]).unwrap_or_else(|error| panic!("port {port}: {error}"));
    for connection in listener.incoming().flatten() {
        thread::spawn(move || answer(connection));
    }
}

fn answer(mut connection: TcpStream) -> io::Result<()> {
    connection.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    let mut line = String::new();
    let mut reader = BufReader::new(connection.try_clone()?);
    reader.read_line(&mut line)?;
    // Read the headers, because closing a connection with unread data resets it.
    let mut header = String::new();
    while reader.read_line(&mut header)? > 2 {
        header.clear();
    }
    let path = line.split(' ').nth(1).unwrap_or_default();
    let body = match path.strip_prefix("/connect/") {
        Some(address) => request(address, "/").map_err(|error| format!("{address}: {error}\n")),
        None => own_addresses(&connection).map_err(|error| format!("{error}\n")),
    };
    let (status, body) = match body {
        Ok(body) => ("200 OK", body),
        Err(error) => ("502 Bad Gateway", error),
    };
    write!(connection, "HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn own_addresses(connection: &TcpStream) -> io::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")?;
    let address = |address: SocketAddr| address.ip().to_canonical();
    Ok(format!("{} {} {}\n", address(connection.local_addr()?), address(connection.peer_addr()?), name.trim()))
}

/// Sends an HTTP request and returns the body of the answer.
fn request(address: &str, path: &str) -> io::Result<String> {
    let mut connection = TcpStream::connect_timeout(&address.parse().map_err(io::Error::other)?, CONNECT_TIMEOUT)?;
    connection.set_read_timeout(Some(CONNECT_TIMEOUT))?;
    write!(connection, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    match head.split(' ').nth(1) {
        Some("200") => Ok(body.to_owned()),
        _ => Err(io::Error::other(body.trim().to_owned())),
    }
}

/// Runs the CNI plugin that this program stands in for, and notes how long it took.
fn run_timed(called: &Path, verb: &str) -> io::Result<ExitCode> {
    let (Some(folder), Some(name)) = (called.parent(), called.file_name()) else {
        return Err(io::Error::other("a plugin has a folder and a name"));
    };
    let timed = folder.join("timed");
    let begun = Instant::now();
    // The plugin looks for the IPAM plugin beside itself, so that only the whole call is measured.
    let status = Command::new(timed.join(name)).env("CNI_PATH", &timed).status()?;
    let line = format!("{verb} {} {}\n", name.to_string_lossy(), begun.elapsed().as_micros());
    File::options().create(true).append(true).open(timed.join("timed.log"))?.write_all(line.as_bytes())?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
