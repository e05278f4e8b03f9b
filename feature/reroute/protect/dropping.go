// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"strings"

	"github.com/weir-project/weir/feature/reroute/links"
)

// tellDropped logs the moment packets of a path lose their last way, and the moment they have one again.
func (w *watcher) tellDropped() {
	of := map[int]*links.WaysLeft{}
	for _, r := range *w.repairs.Load() {
		why := w.words.Get(r.Slot).Reasons()
		if why == 0 || r.Flags&flagShadow != 0 {
			continue
		}
		left := of[int(r.Row)]
		if left == nil {
			left = &links.WaysLeft{Reasons: why}
			of[int(r.Row)] = left
		}
		left.Add(r.Flags&flagFor4 != 0, r.Flags&flagFor6 != 0, w.words.Get(r.Watch).Reasons())
	}
	if len(of) == 0 && len(w.dropping) == 0 {
		return
	}
	if w.dropping == nil {
		w.dropping = map[string]string{}
	}
	for _, p := range w.Paths {
		left := of[p.Row]
		if left == nil {
			left = &links.WaysLeft{}
		}
		packets := strings.Join(left.Dropped(), ", ")
		if packets == w.dropping[p.Name] {
			continue
		}
		args := []any{"path", p.Name, "interface", p.Device}
		if w.Netns != "" {
			args = append(args, "netns", w.Netns)
		}
		if packets == "" {
			w.log.Info("packets have a way again", args...)
			delete(w.dropping, p.Name)
			continue
		}
		w.log.Warn("packets dropped, no way left: a link and all its repairs are down", append(args, "packets", packets, "remedy", left.Remedy())...)
		w.dropping[p.Name] = packets
	}
}
