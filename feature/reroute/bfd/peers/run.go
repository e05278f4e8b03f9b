// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run supervises sessions while a process exists: it resolves neighbours and starts sessions on new or recreated
// devices. It also runs the sessions handed over by bfdd. The sessions of the configuration do not need it otherwise.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	left := inherit()
	running := map[string]runner{} // by scope
	news := map[string]*told{}     // by scope
	var said feature.Reported[string]
	for range (feature.Loop{Every: time.Second}).Turns(ctx) {
		now, _, _, err := readPublished(r)
		if err != nil {
			log.Warn("BFD sessions cannot be read", "err", err)
		}
		for scope, have := range running {
			if p, there := now[scope]; err == nil && (!there || p.Config.FRR != have.frr) {
				have.stop()
				delete(running, scope)
				if !there { // a new namespace of this scope starts without history
					delete(news, scope)
				}
			}
		}
		for scope, p := range now {
			if news[scope] == nil {
				news[scope] = &told{r: r, scope: scope, log: log, up: map[uint32]bool{}}
			}
			if have, runs := running[scope]; runs {
				have.know(p.Config)
			} else {
				running[scope] = start(ctx, r, p, left[scope], news[scope], log, &all)
				delete(left, scope)
			}
			why := ""
			if err := p.startNew(ctx, r); err != nil && ctx.Err() == nil {
				why = err.Error()
			}
			if said.Changed(scope, why) && why != "" {
				log.Warn("BFD sessions wait", "netns", p.Netns, "err", why)
			}
			news[scope].all()
		}
		if err == nil { // close files of namespaces without BFD
			drop(left)
			left = nil
		}
	}
	return nil
}

// again is the delay before a failed or removed part starts again. It is longer than Run needs to notice that a
// namespace has no BFD any more.
const again = 5 * time.Second

// runner supervises the sessions of a namespace.
type runner struct {
	frr    string
	config *atomic.Pointer[Config]
	stop   func()
}

// know sets the runner's configuration.
func (r *runner) know(c Config) {
	if !reflect.DeepEqual(*r.config.Load(), c) {
		r.config.Store(&c)
	}
}

func start(life context.Context, r *kernel.Root, p published, inherited *inherited, t *told, log feature.Logger, all *sync.WaitGroup) runner {
	ctx, cancel := context.WithCancel(life)
	config := &atomic.Pointer[Config]{}
	config.Store(&p.Config)
	own := func() error { return configured(ctx, r, p, config, t, log) }
	ofFRR := func() error {
		l := inherited
		inherited = nil // for the first start only
		return handedOver(ctx, life, r, p, config, l, log)
	}
	for _, part := range []func() error{own, ofFRR} {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := part(); err != nil && ctx.Err() == nil {
					log.Warn("BFD sessions are not supervised, retrying", "netns", p.Netns, "err", err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(again):
				}
			}
		})
	}
	return runner{p.Config.FRR, config, cancel}
}

// configured supervises the sessions of the configuration, including later ones.
func configured(ctx context.Context, r *kernel.Root, p published, config *atomic.Pointer[Config], t *told, log feature.Logger) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	e, err := engine.OpenThere(ctx, r, ns, config.Load().Tick())
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // removed meanwhile: Run ends this
	} else if err != nil {
		return err
	}
	defer e.Close()
	ctx, cancel := context.WithCancel(ctx)
	var other sync.WaitGroup
	defer other.Wait()
	defer cancel()
	other.Go(func() { keepTick(ctx, e, config) })
	other.Go(func() { t.changes(ctx, e) })
	e.Run(ctx, func(err error) { log.Warn("BFD sessions lack a neighbour or a device", "netns", p.Netns, "err", err) })
	return nil
}

// keepTick updates an engine's tick from the current configuration, because the one at its start may be needlessly
// short now.
func keepTick(ctx context.Context, e interface{ SetTick(time.Duration) }, config *atomic.Pointer[Config]) {
	for range (feature.Loop{Every: time.Second}).Turns(ctx) {
		e.SetTick(config.Load().Tick())
	}
}

// startNew starts sessions with new or changed devices.
func (p *published) startNew(ctx context.Context, r *kernel.Root) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	wanted, err := p.resolve(ns)
	if err != nil {
		return err
	}
	found, err := engine.Published{Scope: fmt.Sprint(ns.Inode())}.Identities(r)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // removed meanwhile
	} else if err != nil {
		return err
	}
	for name, s := range wanted {
		if found[p.Discriminators[name]] != s.identity() {
			l, err := r.Lock(ctx)
			if err != nil {
				return err
			}
			defer l.Unlock()
			// A command may have changed or removed the sessions while it held the lock.
			if now, _, _, err := readPublished(r); err != nil || !reflect.DeepEqual(now[kernel.ScopeOf(ns)], *p) {
				return err
			}
			return p.apply(ctx, l)
		}
	}
	return nil
}
