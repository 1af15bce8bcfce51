// The report's source of data: the page itself.
const held = JSON.parse(document.getElementById("data").textContent);
const errorsOf = (clip) => (clip.error ? Infinity : (clip.words === null ? clip.character_errors : clip.word_errors) || 0);
const lengthOf = (clip) => (clip.words === null ? clip.characters : clip.words) || 1;
const WEIGHTS = {
  errors: errorsOf,
  error_rate: (clip) => errorsOf(clip) / lengthOf(clip),
  slowest: (clip) => clip.seconds || clip.final_ms / 1000 || 0,
  longest: (clip) => clip.audio_s,
};

showEvaluations(document.getElementById("evaluations"), {
  runs: held.runs,
  clips: async (run, order, offset, limit) => {
    const sorted = [...run.rows].sort((one, other) => {
      const [a, b] = [WEIGHTS[order](one), WEIGHTS[order](other)];
      return a === b ? 0 : b - a; // two failed clips are both infinitely wrong
    });
    return { data: sorted.slice(offset, offset + limit), total: sorted.length };
  },
  audio: async (run, clip) => held.audio[clip.audio],
  words: String,
});
document.querySelector("main").append(make("p", { class: "soft", id: "left-out" }, held.left_out));
