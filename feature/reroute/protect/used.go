// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"strings"

	"github.com/weir-project/weir/feature/reroute/links"
)

// passOn keeps the down reasons of removed interfaces for new interfaces with the same names.
func (w *watcher) passOn(was map[int]*watched) {
	if w.gone == nil {
		w.gone = map[string]links.Reason{}
	}
	for index, o := range was {
		if w.links[index] == nil && o.protected && o.against != 0 {
			w.gone[o.name] = o.against
		}
	}
	for index, l := range w.links {
		if why, known := w.gone[l.name]; known && was[index] == nil {
			l.against = why
			delete(w.gone, l.name)
		}
	}
}

// tellUsed logs each protected link once it is usable again, for any reason. A new session is only one of several.
func (w *watcher) tellUsed() {
	for _, l := range w.links {
		now := w.words.Get(l.slot).Reasons()
		if l.protected && l.against != 0 && now == 0 {
			w.log.Info("link is used again", "interface", l.name, "was", against(l.against))
		}
		l.against = now
	}
}

// against names the reasons against a link.
func against(why links.Reason) string {
	var out []string
	for i, name := range []string{"not answered", "no carrier", "drained"} {
		if why&(1<<i) != 0 {
			out = append(out, name)
		}
	}
	return strings.Join(out, ", ")
}
