// Runs one task at a time and, of those that come meanwhile, the newest alone: a pointer asks faster than a server answers.
// Knows no task.

/** Tasks that take each other's place. */
export class Newest {
  constructor() {
    this.waiting = null;
    this.isRunning = false;
  }

  /** Runs `task`, an async function that lets no error out, unless another one is to be run before it begins. */
  async run(task) {
    this.waiting = task;
    if (this.isRunning) return;
    this.isRunning = true;
    while (this.waiting !== null) {
      const next = this.waiting;
      this.waiting = null;
      await next();
    }
    this.isRunning = false;
  }
}
