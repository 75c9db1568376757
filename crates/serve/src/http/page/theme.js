// Applies the colours that were chosen before anything is drawn, so that nothing flashes.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The browser keeps nothing for this page; the colours are as the system has them.
}
