// Theme and panels before the first paint, so that nothing flashes. Not a module: modules run later.
(() => {
  const read = (name) => {
    try {
      return JSON.parse(localStorage.getItem(`llamacli-${name}`));
    } catch {
      return null;
    }
  };
  const theme = read("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
