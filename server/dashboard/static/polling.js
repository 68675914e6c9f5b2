// Asks again and again while the page is seen: what one question does never holds up another's turn. Knows no question.

import { onKeyChange } from "./api.js";

/**
 * Calls `ask(signal)` now, and again as many seconds later as it returns; null: not before another key is entered, the
 * page is seen again, or the function that this returns is called. Each of these begins anew, and aborts the question
 * that is open. What `ask` throws once it is aborted is of no interest.
 */
export function poll(ask) {
  let timer = 0;
  let controller = new AbortController();
  const turn = async () => {
    clearTimeout(timer);
    controller.abort();
    if (document.hidden) return;
    const { signal } = (controller = new AbortController());
    try {
      const seconds = await ask(signal);
      if (!signal.aborted && seconds !== null) timer = setTimeout(turn, 1000 * seconds);
    } catch (error) {
      if (!signal.aborted) throw error;
    }
  };
  document.addEventListener("visibilitychange", turn);
  onKeyChange(turn);
  turn();
  return turn;
}
