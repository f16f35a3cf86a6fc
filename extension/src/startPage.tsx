// The start page: a new notebook that has workers, and the lessons by track, a card for each. `rpcbench lab` opens it.
// The lessons are those of `lessons.json` in `notebooks/`: here, in `rpcbench-course/`, or in one of the newest folders
// here, as `rpcbench lessons NAME` makes one of any name; the first one found counts. A row has a title, a sentence,
// minutes, exercises. Each lesson has a picture, `pictures/<lesson>.svg` beside it. The solved exercises are in
// `progress.json`, which the checks of the lessons write.

import type { Contents } from '@jupyterlab/services';
import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import { rpcbenchIcon } from './icons';
import { STRINGS } from './strings';

const TABLE = 'lessons.json';
const NOTEBOOKS = 'notebooks';
const COURSE = 'rpcbench-course'; // the folder that `rpcbench lessons` makes without a name
const MOST_FOLDERS = 10; // to look into: a home may have hundreds, each a request
const WORDS = STRINGS.startPage;
const TRACKS = Object.keys(WORDS.tracks) as Lesson['track'][];

/** A row of `lessons.json`. */
interface Lesson {
  /** The name of its file, without `.ipynb`. */
  lesson: string;
  title: string;
  about: string;
  minutes: number;
  track: keyof typeof STRINGS.startPage.tracks;
  /** The module of its checks, and the number of exercises. */
  checks: string;
  exercises: number;
}

interface Card extends Lesson {
  path: string;
  picture: string;
  solved: number;
}

export class StartPage extends ReactWidget {
  constructor(contents: Contents.IManager, openNotebook: (path: string) => void, newNotebook: () => void) {
    super();
    this.id = 'rpcbench-start-page';
    this.addClass('rbx-start-page');
    this.title.label = WORDS.tab;
    this.title.icon = rpcbenchIcon;
    this.title.closable = true;
    this.node.tabIndex = 0;
    this._openNotebook = openNotebook;
    this._newNotebook = newNotebook;
    this._contents = contents;
    void this._look();
  }

  /** Exercises may have been solved while another tab was in front. */
  protected override onAfterShow(): void {
    void this._look();
  }

  private async _look(): Promise<void> {
    this._cards = await findLessons(this._contents);
    this.update();
  }

  protected override render(): React.JSX.Element {
    const cards = this._cards;
    return (
      <div className="rbx-page">
        <header>
          <rpcbenchIcon.react tag="span" />
          <div>
            <h1>{WORDS.title}</h1>
            <p>{WORDS.about}</p>
          </div>
          <button className="rbx-button rbx-new" title={WORDS.newAbout} onClick={this._newNotebook}>
            <b>{WORDS.newTitle}</b>
            <span>{WORDS.newAbout}</span>
          </button>
        </header>
        {!cards?.length && <p className="rbx-hint">{cards ? WORDS.noLessons : WORDS.waits}</p>}
        {TRACKS.map(track => this._track(track, cards?.filter(card => card.track === track) ?? []))}
      </div>
    );
  }

  private _track(track: Lesson['track'], cards: Card[]): React.JSX.Element | null {
    const title = WORDS.tracks[track];
    return cards.length ? (
      <section key={track}>
        <h2>{title}</h2>
        <ol aria-label={title}>
          {cards.map((card, index) => (
            <li key={card.path}>{this._card(card, track === 'start' && index === 0)}</li>
          ))}
        </ol>
      </section>
    ) : null;
  }

  private _card(card: Card, isFirst: boolean): React.JSX.Element {
    return (
      <button className="rbx-card" onClick={() => this._openNotebook(card.path)}>
        <img src={card.picture} alt="" width="160" height="90" />
        <span className="rbx-title">{card.title}</span>
        <span className="rbx-what">{card.about}</span>
        <span className="rbx-minutes">
          {WORDS.minutes(card.minutes)}
          {card.solved > 0 && ` · ${WORDS.solved(card.solved, card.exercises)}`}
        </span>
        {isFirst && <span className="rbx-here">{WORDS.startHere}</span>}
      </button>
    );
  }

  private readonly _contents: Contents.IManager;
  private readonly _openNotebook: (path: string) => void;
  private readonly _newNotebook: () => void;
  private _cards: Card[] | null = null; // null while the page looks for them
}

async function findLessons(contents: Contents.IManager): Promise<Card[]> {
  const folder = await findFolder(contents);
  const lessons = folder === null ? null : await read<Lesson[]>(contents, `${folder}${TABLE}`);
  const solved = (lessons && (await read<Record<string, string[]>>(contents, `${folder}progress.json`))) ?? {};
  const card = async (row: Lesson): Promise<Card> => ({
    ...row,
    path: `${folder}${row.lesson}.ipynb`,
    picture: await contents.getDownloadUrl(`${folder}pictures/${row.lesson}.svg`),
    solved: solved[row.checks]?.length ?? 0
  });
  return Promise.all((lessons ?? []).map(card));
}

/** The folder of the lessons, with a slash at its end; "" is the one that the server shows; null if there is none. */
async function findFolder(contents: Contents.IManager): Promise<string | null> {
  const here = await list(contents, '');
  const folders = here.filter(one => one.type === 'directory');
  const isCourse = (one: Contents.IModel): number => Number(one.name === COURSE);
  folders.sort((one, other) => isCourse(other) - isCourse(one) || other.last_modified.localeCompare(one.last_modified));
  for (const parent of ['', ...folders.slice(0, MOST_FOLDERS).map(one => `${one.path}/`)]) {
    const inner = `${parent}${NOTEBOOKS}`;
    // Folders are listed, as a request for a file that is not there is an error in the browser's console.
    if (has(await list(contents, parent), NOTEBOOKS) && has(await list(contents, inner), TABLE)) {
      return `${inner}/`;
    }
  }
  return has(here, TABLE) ? '' : null;
}

/** The content of a folder; none if it cannot be read. */
async function list(contents: Contents.IManager, path: string): Promise<Contents.IModel[]> {
  const folder = await contents.get(path, { type: 'directory', content: true }).catch(() => null);
  return (folder?.content as Contents.IModel[] | undefined) ?? [];
}

function has(folder: Contents.IModel[], name: string): boolean {
  return folder.some(one => one.name === name);
}

/** The content of a JSON file; null if there is none. */
async function read<T>(contents: Contents.IManager, path: string): Promise<T | null> {
  const options: Contents.IFetchOptions = { type: 'file', format: 'text', content: true };
  const file = await contents.get(path, options).catch(() => null);
  return file && (JSON.parse(String(file.content)) as T);
}
