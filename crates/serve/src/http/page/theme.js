// Applies the chosen colours before anything is drawn, to avoid a flash.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Without storage, the page uses the system's colours.
}
