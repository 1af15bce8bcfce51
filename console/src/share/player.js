// Inside the file that is shared: a time plays from there, and what is heard is marked.
const audio = document.querySelector("audio");
const rows = [...document.querySelectorAll("li")];
let shown;
for (const row of rows) {
  row.querySelector("button").addEventListener("click", () => {
    audio.currentTime = Number(row.dataset.start);
    void audio.play();
  });
}
audio.addEventListener("timeupdate", () => {
  const now = audio.currentTime;
  const row = rows.findLast((each) => Number(each.dataset.start) <= now && now < Number(each.dataset.end));
  if (row === shown) return;
  shown?.classList.remove("now");
  row?.classList.add("now");
  row?.scrollIntoView({ block: "nearest" });
  shown = row;
});
