// Sorts tables by a click on a column's head; without it the page says the same in the order of the ranking.
document.documentElement.classList.add("js");
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      const key = (row) => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      const number = head.classList.contains("num");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const order = number ? parseFloat(key(a)) - parseFloat(key(b)) : key(a).localeCompare(key(b), undefined, { numeric: true });
        return down ? -order : order;
      });
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    });
  });
}
