// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb/admit"
	"github.com/weir-project/weir/feature/handoff/lb/locate"
	"github.com/weir-project/weir/feature/handoff/lb/names"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// admits returns nil if an agent may connect as a backend. Its number and name must match a configured backend. With Register a
// new backend may connect, with a name and number nobody else has. The caller holds mu.
func (a *Agent) admits(h peer.Hello) error {
	if h.Role != peer.BackendAgent || h.Number == 0 || h.Number > MaxBackends {
		return fmt.Errorf("not a backend, or no number from 1 to %d: set handoff.backend.number", MaxBackends)
	}
	if name, ok := a.names[h.Number]; ok {
		if name != h.Name {
			return fmt.Errorf("backend %d is %s: give each backend a number of its own", h.Number, name)
		}
		return nil
	}
	if !a.o.Manage || !a.o.Register {
		return fmt.Errorf("unknown backend: name it in lb.backends, or set lb.register: true")
	}
	for number, name := range a.names {
		if name == h.Name {
			return fmt.Errorf("backend %s has number %d: set handoff.backend.number to it, or change lb.backends", name, number)
		}
	}
	return a.owns(h.Number, h.Name)
}

// owns returns an error if a number belongs to another backend, or the backend has another number. A number belongs to its
// backend while it has a location, flows or a connection, also over a restart of this agent. The caller holds mu.
func (a *Agent) owns(number move.Backend, name string) error {
	o, owned := a.f.names.Owner(number)
	for n, c := range a.backends {
		switch {
		case n == number && c.Peer.Name != name && o.Loose:
			return fmt.Errorf("number %d is held by backend %s, connected from %s: use another number", number, c.Peer.Name, c.Remote())
		case n != number && c.Peer.Name == name:
			return fmt.Errorf("backend %s has number %d, connected from %s: a backend keeps its number", name, n, c.Remote())
		}
	}
	switch there := a.pair.nameThere(number); {
	case (!owned || o.Loose) && there != "" && there != name:
		return fmt.Errorf("number %d belongs to backend %s at the partner: use another number", number, there)
	case owned && o.Unknown():
		return fmt.Errorf("number %d has flows of a backend of unknown name (data path of an earlier weir, or a lost pin) at %s: connect from there, or use another number", number, o.Location)
	case owned && o.Name != name && !a.absent[number]:
		return fmt.Errorf("number %d belongs to backend %s%s", number, o.Name, a.refusal(number, "number", peer.Hello{Name: name, Number: number}))
	}
	if owned && o.Name == name { // perhaps with an earlier number of the file, too
		return nil
	}
	if n := a.f.names.Number(name); n != 0 && n != number {
		return fmt.Errorf("backend %s has number %d: a backend keeps its number", name, n)
	}
	return nil
}

// refusal returns the end of an error about a number of another backend, or its address (thing). by wants it. The caller holds mu.
func (a *Agent) refusal(number move.Backend, thing string, by peer.Hello) string {
	away := a.away(number)
	if away == 0 || a.names[number] != "" {
		return ": use another " + thing
	}
	return admit.Kept{Since: time.Now().Add(-away), For: a.o.IdleTimeout, Flows: a.flowsOf[number] > 0}.Refusal(by.Name, by.Number)
}

// adoptName gives a number to a backend at the partner, unless another one has it here. The partner knows names of an earlier
// weir's numbers. The caller holds mu.
func (a *Agent) adoptName(w peer.Member) error {
	if o, owned := a.f.names.Owner(w.Number); !owned || !o.Unknown() {
		if err := a.owns(w.Number, w.Name); err != nil {
			return err
		}
	}
	return a.claimNumber(w.Number, w.Name)
}

// claimNumber gives a number to a backend. The location and flows of an absent backend with the number go first. The caller holds mu.
func (a *Agent) claimNumber(number move.Backend, name string) error {
	if a.absent[number] {
		if o, owned := a.f.names.Owner(number); owned && o.Name != name {
			if err := errors.Join(a.f.vacate(number), a.f.locations().Drop(number), a.f.dropFlows(number)); err != nil {
				return fmt.Errorf("take number %d from absent backend %s: %w", number, o.Name, err)
			}
		}
		delete(a.absent, number)
	}
	return a.f.names.Keep(number, name)
}

// yield gives numbers of other names at the partner to these: numbers held by a connection alone, and numbers taken while the
// partner was not heard, unless the partner took them later. Made-up flows do not keep a number. The caller holds mu.
func (a *Agent) yield(there *peer.Pair) (err error) {
	for _, number := range a.f.names.All() {
		since, young := a.young[number]
		o, _ := a.f.names.Owner(number)
		name := a.pair.nameThere(number)
		age, youngThere := there.Young[number]
		switch {
		case a.names[number] != "" || o.Unknown() || name == "" || name == o.Name:
			continue
		case !o.Loose && (!young || youngThere && age <= time.Since(since).Milliseconds()):
			continue
		}
		a.o.Log.Warn("number belongs to another backend at the partner, disconnecting this one", "number", number, "name", o.Name, "owner", name)
		if c := a.backends[number]; c != nil {
			c.Close()
			delete(a.backends, number)
			a.left[number] = time.Now()
		}
		if a.members[number] != nil {
			delete(a.members, number)
			a.news = true
		}
		a.absent[number] = true // its location and flows go
		err = errors.Join(err, a.claimNumber(number, name))
	}
	clear(a.young)
	return err
}

// isOther reports whether a number has another name at the partner. The caller holds mu.
func (a *Agent) isOther(number move.Backend) bool {
	o, owned := a.f.names.Owner(number)
	there := a.pair.nameThere(number)
	return owned && there != "" && there != o.Name && !o.Unknown()
}

// prove gives a number of an earlier weir's data path to the connected backend, if its connection comes from the number's
// location. The data path itself tells its backend nothing else.
func (a *Agent) prove(c *peer.Conn) error {
	number := c.Peer.Number
	o, owned := a.f.names.Owner(number)
	if !owned || !o.Unknown() || c.Peer.Role != peer.BackendAgent || !a.o.Register {
		return nil
	}
	var at locate.Location
	err := a.f.ns.Do(func() (err error) { at, err = locate.Find(c.Remote()); return err })
	if err != nil || o.Location == "" || at.Key().String() != o.Location {
		return err // admits rejects it
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if again, _ := a.f.names.Owner(number); again != o || a.f.names.Number(c.Peer.Name) != 0 {
		return nil
	}
	a.o.Log.Info("backend of earlier weir is back", "name", c.Peer.Name, "number", number, "location", o.Location)
	return a.f.names.Keep(number, c.Peer.Name)
}

// keep notes the backend of a new connection as the owner of its number, before any flow can become known for it. The note goes
// with the connection if the backend never registers. The caller holds mu.
func (a *Agent) keep(h peer.Hello) error {
	o, owned := a.f.names.Owner(h.Number)
	takes := !owned || o.Name != h.Name
	if takes && !a.pair.isHeard() {
		a.young[h.Number] = time.Now()
	}
	err := a.claimNumber(h.Number, h.Name)
	if takes || a.names[h.Number] != "" {
		err = errors.Join(err, a.f.names.Loosen(h.Number, takes))
	}
	return errors.Join(err, a.f.names.Leave(h.Number, 0))
}

// keepNamed notes the names of the file's backends. The file has precedence over earlier owners. A name of the file alone is
// loose until its agent has connected.
func (a *Agent) keepNamed() (err error) {
	for number, name := range a.names {
		if o, owned := a.f.names.Owner(number); owned && !o.Unknown() && o.Name != name {
			a.o.Log.Warn("lb.backends gives a number to another backend", "number", number, "name", name, "before", o.Name)
		} else if owned && !o.Unknown() {
			continue
		}
		err = errors.Join(err, a.f.names.Keep(number, name), a.f.names.Loosen(number, true))
	}
	var unknown []move.Backend
	for _, number := range a.f.names.All() {
		if o, _ := a.f.names.Owner(number); o.Unknown() {
			unknown = append(unknown, number)
		}
	}
	if len(unknown) > 0 {
		a.o.Log.Warn("names of backends unknown, as after an earlier weir or a lost pin: their numbers stay closed until they are back or their flows are gone", "numbers", unknown)
	}
	return err
}

// freeNumbers frees numbers without a backend, location and flows: of registered backends after an absence of IdleTimeout, of
// loose owners at once. A number with a location is marked as absent then: the latest backend may still serve datagrams. owned are the
// flows by number. The caller holds mu.
func (a *Agent) freeNumbers(owned map[move.Backend]int) (err error) {
	if !a.o.Manage {
		return nil
	}
	placed := a.f.locations().Placed()
	for _, number := range a.f.names.All() {
		o, _ := a.f.names.Owner(number)
		delete(a.absent, number)
		switch {
		case a.members[number] != nil || a.backends[number] != nil || a.names[number] != "" || owned[number] > 0:
		case placed[number]:
			a.absent[number] = !o.Unknown() && (o.Loose || a.away(number) >= a.o.IdleTimeout)
		case o.Unknown() || o.Loose || a.away(number) >= a.o.IdleTimeout:
			a.o.Log.Info("number of absent backend is free", "number", number, "name", o.Name)
			delete(a.young, number)
			err = errors.Join(err, a.f.names.Free(number))
		}
	}
	return err
}

// openNames opens the names of an earlier data path's backends. A data path of an earlier weir, or with a lost pin, has none: its
// numbers with a location or flows then belong to backends of unknown name.
func (f *DataPath) openNames(share map[string]*ebpf.Map) (err error) {
	pinned := share["lb_"+names.MapName]
	if f.names, err = names.Open(pinned); err != nil || share == nil || pinned != nil {
		return err
	}
	at := map[move.Backend]string{}
	if err := f.Flows(func(_ Key, fl Flow) bool { at[fl.Owner] = ""; return true }); err != nil {
		return err
	}
	for number, keys := range f.locations().Locations() {
		at[number] = keys[0].String()
	}
	for number, location := range at {
		err = errors.Join(err, f.names.KeepUnknown(number, location))
	}
	return err
}

// silentAfter is the number of unanswered pings after which an agent's connection no longer blocks a duplicate.
const silentAfter = 2

// duplicate rejects a second backend with the name, number and certificate of a connected one, for example a cloned machine. The
// two would take flows from each other and reset them.
//
// An agent may replace its own connection after a restart. It is the same agent if its instance or its address is the same, or if
// the old connection does not answer pings. The caller holds mu.
func (a *Agent) duplicate(c *peer.Conn) error {
	before := a.backends[c.Peer.Number]
	if before == nil || before.Peer.Instance == c.Peer.Instance || before.Unanswered() >= silentAfter || before.Remote() == c.Remote() {
		return nil
	}
	return fmt.Errorf("%s (number %d) is connected from %s: give the backend at %s a name, number and certificate of its own",
		c.Peer.Name, c.Peer.Number, before.Remote(), c.Remote())
}
