// The start page: a new notebook that has workers, and a card for each lesson. `rpcbench lab` opens it.
// The lessons are those of `lessons.json` in the folder `notebooks`, or in the folder that JupyterLab shows: title, a sentence,
// minutes. Each has a picture, `pictures/<lesson>.svg` beside it.

import type { Contents } from '@jupyterlab/services';
import { ReactWidget } from '@jupyterlab/ui-components';
import React from 'react';

import { rpcbenchIcon } from './icons';
import { STRINGS } from './strings';

const FOLDERS = ['notebooks/', ''];
const WORDS = STRINGS.startPage;

/** A row of `lessons.json`. */
interface Lesson {
  /** The name of its file, without `.ipynb`. */
  lesson: string;
  title: string;
  about: string;
  minutes: number;
}

interface Card extends Lesson {
  path: string;
  picture: string;
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
    void findLessons(contents).then(cards => {
      this._cards = cards;
      this.update();
    });
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
        <h2>{WORDS.lessons}</h2>
        {!cards?.length && <p className="rbx-hint">{cards ? WORDS.noLessons : WORDS.waits}</p>}
        <ol aria-label={WORDS.lessons}>
          {cards?.map((card, index) => (
            <li key={card.path}>
              <button className="rbx-card" onClick={() => this._openNotebook(card.path)}>
                <img src={card.picture} alt="" width="160" height="90" />
                <span className="rbx-title">{card.title}</span>
                <span className="rbx-what">{card.about}</span>
                <span className="rbx-minutes">{WORDS.minutes(card.minutes)}</span>
                {index === 0 && <span className="rbx-here">{WORDS.startHere}</span>}
              </button>
            </li>
          ))}
        </ol>
      </div>
    );
  }

  private readonly _openNotebook: (path: string) => void;
  private readonly _newNotebook: () => void;
  private _cards: Card[] | null = null; // null while the page looks for them
}

async function findLessons(contents: Contents.IManager): Promise<Card[]> {
  for (const folder of FOLDERS) {
    const options: Contents.IFetchOptions = { type: 'file', format: 'text', content: true };
    const file = await contents.get(`${folder}lessons.json`, options).catch(() => null);
    if (file) {
      const lessons = JSON.parse(String(file.content)) as Lesson[];
      const card = async (row: Lesson): Promise<Card> => ({
        ...row,
        path: `${folder}${row.lesson}.ipynb`,
        picture: await contents.getDownloadUrl(`${folder}pictures/${row.lesson}.svg`)
      });
      return Promise.all(lessons.map(card));
    }
  }
  return [];
}
