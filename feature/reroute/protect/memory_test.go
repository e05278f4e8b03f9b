// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/netns"
)

// A link can fail during its hold time while no watcher runs. The next watcher knows from its predecessor that the
// link was up, and keeps its routes.
func TestWatcherKeepsItsMemory(t *testing.T) {
	w := newWorld(t)
	keptFor(t, time.Hour)
	w.objects()
	path := w.path(around())
	path.Hold = time.Hour
	w.apply(path)
	inst := instanceKey(netnsScope(w.r1))
	var m memory
	begin := func() (end func()) {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		log := &heardLog{testLog: testLog{t}}
		go func() { ended <- watch(ctx, w.root, inst, log, &m) }()
		end = func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		t.Cleanup(cancel)
		w.until("links are followed", func() bool { return log.count("links are followed") > 0 })
		return end
	}
	carrier := func(up bool) {
		w.eventually("main's carrier changes", func() bool { return strings.Contains(w.ip(w.r1, "-o link show main"), "LOWER_UP") == up })
	}
	end := begin()
	w.until("the routes have copies", func() bool { return w.state("core").Routes.Kept == 4 })
	w.ip(w.r2, "link set main down")
	w.until("the copies are used", func() bool { r := w.state("core").Routes; return r.InUse && r.Lost == 4 })
	w.ip(w.r2, "link set main up")
	carrier(true)
	w.objectsAgain()
	w.until("the copies are not used any more", func() bool { return !w.state("core").Routes.InUse })
	end() // the link is up and in its hold time
	if st := w.state("core"); !st.Carrier || st.Routes.InUse || len(m.links) == 0 {
		t.Fatalf("at the end of the first watcher: %+v, %d links known", st, len(m.links))
	}
	w.ip(w.r2, "link set main down")
	carrier(false)
	w.becomes(addrD, false)
	begin()
	w.until("the copies are used by the second watcher", func() bool { return w.state("core").Routes.InUse })
	if p := w.pair(true); !p.arrives(1000, patience) {
		t.Errorf("a packet did not arrive: %+v", w.state("core"))
	}
}

// The memory of another namespace with the same number is discarded.
func TestMemoryOfAnotherNamespace(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	m := memory{id: netns.ID{Inode: w.r1.Inode(), Cookie: 1}, links: map[int]*watched{1: {name: "stale"}}}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := watch(ctx, w.root, instanceKey(netnsScope(w.r1)), testLog{t}, &m); err != nil {
		t.Fatal(err)
	}
	if m.id != w.r1.ID() || m.links[1] != nil || len(m.links) != 2 {
		t.Errorf("the memory is %+v", m)
	}
}
