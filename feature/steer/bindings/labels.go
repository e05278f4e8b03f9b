// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// checkLabel validates a new name. Existing names only satisfy LabelKey, because previous versions accepted every byte.
func checkLabel(name string) error {
	if _, err := engine.LabelKey(name); err != nil {
		return err
	}
	if printable.Text(name) != name || strings.TrimSpace(name) != name {
		return fmt.Errorf("%w: %q: want printable UTF-8 characters without leading or trailing spaces", engine.ErrLabel, name)
	}
	return nil
}

// count writes the number of bindings of each service number. It forgets names without bindings and sockets.
func (d *dispatch) count(counts map[uint32]uint32) error {
	all, err := d.labels.All()
	if err != nil {
		return err
	}
	for name, x := range all {
		switch n := counts[x.ID]; {
		case n == 0 && !d.HasSocket(x.ID):
			err = d.labels.Forget(name)
		case n != x.Bindings:
			err = d.labels.Put(name, engine.Label{ID: x.ID, Bindings: n})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// acquire returns the label of a name, assigning a number to a new name. The number stays reserved until the dispatch
// is closed, also before its first binding: one change acquires many names before it binds anything.
func (d *dispatch) acquire(name string) (x engine.Label, err error) {
	x, ok, err := d.labels.Get(name)
	if err == nil && !ok {
		x, err = d.assign(name)
	}
	if err == nil {
		d.acquired[x.ID] = true
	}
	return x, err
}

// assign assigns a number to a new name.
func (d *dispatch) assign(name string) (x engine.Label, err error) {
	r, err := d.labels.Registry()
	if err != nil {
		return x, err
	}
	fresh := r.Next < engine.MaxNamed // a number without previous entries
	if fresh {
		x.ID = r.Next
		r.Next++
		err = d.maps("registry").Put(uint32(0), r)
	} else if x.ID, err = d.freeNumber(); err == nil {
		err = d.clear(x.ID)
	}
	if err != nil {
		return x, err
	}
	n := bpf.SteerNamed{}
	if p := d.Services[name]; p != nil {
		n = engine.NamedEndpoints(p)
	}
	if n != (bpf.SteerNamed{}) || !fresh {
		if err := d.maps("named").Put(x.ID, n); err != nil {
			return x, err
		}
	}
	kernel.Step("steer:numbered")
	return x, d.labels.Put(name, x)
}

func (d *dispatch) maps(name string) *ebpf.Map { return d.Pins.Maps[name] }

// freeNumber returns a number without bindings and sockets. It reads the names once for all free numbers, because a
// change may acquire tens of thousands.
func (d *dispatch) freeNumber() (uint32, error) {
	if len(d.free) == 0 {
		if err := d.findFree(); err != nil {
			return 0, err
		}
	}
	if len(d.free) == 0 {
		return 0, fmt.Errorf("namespace %s has %d services with bindings or sockets, the maximum: unbind or unregister one", d.Scope, engine.MaxNamed)
	}
	id := d.free[0]
	d.free = d.free[1:]
	return id, nil
}

// findFree lists the free numbers, and forgets unused names.
func (d *dispatch) findFree() error {
	all, err := d.labels.All()
	if err != nil {
		return err
	}
	used := make([]bool, engine.MaxNamed)
	for name, x := range all {
		if x.Bindings > 0 || d.acquired[x.ID] || d.Services[name] != nil || d.HasSocket(x.ID) {
			used[x.ID] = true
		} else if err := d.labels.Forget(name); err != nil {
			return err
		}
	}
	for id, is := range used {
		if !is {
			d.free = append(d.free, uint32(id))
		}
	}
	return nil
}

// clear removes a number's entries of its previous name.
func (d *dispatch) clear(id uint32) error {
	for kind := range uint32(engine.KindsIPv4) {
		if err := d.maps("given").Delete(id*engine.KindsIPv4 + kind); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) && !errors.Is(err, unix.EINVAL) {
			return err // EINVAL: the entry is empty (sock_map_delete_elem)
		}
	}
	return kernel.ZeroPerCPU[bpf.SteerHits](d.maps("hits"), id)
}
