//! A bug that shows as a panic: never a text of its own on standard output or error, but an error like any other.

use std::any::Any;
use std::cell::RefCell;
use std::panic;

use agent::CniError;

thread_local! {
    /// Where the last panic of this thread was, for [`error`].
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics silent in the whole process. The code that catches one reports it: [`run`](crate::run) in its error, a
/// store's adapter in its own.
pub fn install_hook() {
    panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string);
        // A thread that is being torn down has no such variable any more; then the place is not reported.
        let _ = PLACE.try_with(|last| last.replace(place));
    }));
}

/// The error for a panic that was caught.
pub(crate) fn error(payload: &(dyn Any + Send)) -> CniError {
    let text = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let place = PLACE.with(RefCell::take).map(|place| format!(" at {place}")).unwrap_or_default();
    CniError::internal(format!("margay-ipam stopped at an error of its own: {}{place}", text.unwrap_or("no text")))
        .with_details("it is not known whether the call was carried out, DEL is safe to repeat; please report this")
}
