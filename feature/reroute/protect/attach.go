// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/kernel"
)

// filterName names the tc filter on kernels without tcx.
const filterName = "weir_reroute"

// tcx reports whether programs attach by tcx links. Tests override it to force filters.
var tcx = func() bool { return kernel.TCXLink.Check() == nil }

func linkPin(index int) string { return linkPrefix + strconv.Itoa(index) }

// protected maps the indexes of interfaces needing the egress program to their names.
func protected(routes []route) map[int]string {
	out := map[int]string{}
	for _, r := range routes {
		out[r.ifindex] = r.path.Device
	}
	return out
}

// load loads a program, with the pinned maps in place of its own.
func (s *instance) load(name string) (*kernel.Collection, error) { return loadOver(s.pins.Maps, name) }

func loadOver(pinned map[string]*ebpf.Map, name string) (*kernel.Collection, error) {
	spec, err := bpf.LoadProtect()
	if err != nil {
		return nil, err
	}
	share := map[string]*ebpf.Map{}
	for pin, m := range mapNames {
		share[m] = pinned[pin]
	}
	return kernel.Load(spec, []string{name}, share)
}

// attach attaches the egress program to the protected interfaces and detaches it from all others. Then it removes
// helper pairs without a repair.
func (s *instance) attach(routes []route) error {
	want := protected(routes)
	have, err := s.detachOthers(want)
	if err != nil {
		return err
	}
	missing := maps.Clone(want)
	for index := range have {
		delete(missing, index)
	}
	if len(missing) > 0 {
		c, err := s.load(bpf.ProtectProgRerouteEgress)
		if err != nil {
			return err
		}
		defer c.Close()
		for _, index := range slices.Sorted(maps.Keys(missing)) {
			if err := s.attachOne(index, missing[index], c.Programs[bpf.ProtectProgRerouteEgress]); err != nil {
				return err
			}
			kernel.Step("protect:attached")
		}
	}
	if err := s.noteFilters(); err != nil {
		return err
	}
	if len(routes) == 0 {
		return nil
	}
	return s.dropUnused(routes)
}

// detachOthers detaches the program from unwanted interfaces. It returns the remaining attached ones.
func (s *instance) detachOthers(want map[int]string) (map[int]bool, error) {
	have := map[int]bool{}
	pins, err := s.pins.Links()
	if err != nil {
		return nil, err
	}
	for _, pin := range pins {
		var index int
		if _, err := fmt.Sscanf(pin, linkPrefix+"%d", &index); err != nil {
			continue
		}
		if want[index] != "" && s.attached(pin, index) {
			have[index] = true
			continue
		}
		if err := s.lock.RemoveLink(s.inst, pin); err != nil {
			return nil, err
		}
	}
	var index, ours uint32
	var gone []uint32
	it := s.pins.Maps[pinDevices].Iterate()
	for it.Next(&index, &ours) {
		f := kernel.Clsact{Ifindex: int(index), Name: filterName, Egress: true}
		on := false
		err := s.ns.Do(func() (err error) {
			if want[int(index)] != "" {
				on, err = f.Attached()
				return err
			}
			return f.Detach(ours == 1)
		})
		if err != nil {
			return nil, err
		}
		have[int(index)] = on
		if !on {
			delete(have, int(index))
			gone = append(gone, index)
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("reading the interfaces with filters: %w", err)
	}
	for _, index := range gone {
		if err := s.pins.Maps[pinDevices].Delete(index); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
	}
	return have, nil
}

// attached reports whether a pinned link holds the program at an interface.
func (s *instance) attached(pin string, index int) bool {
	ln, err := s.pins.Link(pin)
	if err != nil {
		return false
	}
	defer ln.Close()
	return kernel.TCX{Ifindex: index, Egress: true}.Verify(ln) == nil
}

func (s *instance) attachOne(index int, name string, p *ebpf.Program) error {
	if !tcx() {
		return s.attachFilter(index, p)
	}
	var ln kernel.Link
	err := s.ns.Do(func() (err error) {
		ln, err = kernel.TCX{Ifindex: index, Device: name, Egress: true}.Attach(p)
		return err
	})
	if errors.Is(err, unix.ENODEV) {
		return nil // the interface was removed meanwhile
	} else if err != nil {
		return err
	}
	defer ln.Close()
	return s.lock.AddLink(s.inst, linkPin(index), ln)
}

// noteFilters records the filters used in place of links, so their loss is reported.
func (s *instance) noteFilters() error {
	if tcx() {
		return nil
	}
	var all []kernel.Clsact
	var index, ours uint32
	it := s.pins.Maps[pinDevices].Iterate()
	for it.Next(&index, &ours) {
		all = append(all, kernel.Clsact{Ifindex: int(index), Name: filterName, Egress: true})
	}
	return errors.Join(it.Err(), s.ns.Do(func() error { s.lock.NoteFilters(s.inst, all); return nil }))
}

// attachFilter records the interface before attaching the filter, so a killed command leaves no unknown filter.
func (s *instance) attachFilter(index int, p *ebpf.Program) error {
	return s.ns.Do(func() error {
		f := kernel.Clsact{Ifindex: index, Name: filterName, Egress: true}
		there, err := f.HasQdisc()
		if err != nil {
			return err
		}
		ours := uint32(1)
		if there {
			ours = 0
		}
		if err := s.pins.Maps[pinDevices].Put(uint32(index), ours); err != nil {
			return fmt.Errorf("recording interface %d: %w", index, err)
		}
		kernel.Step("protect:noted")
		if err := f.Attach(p); !errors.Is(err, unix.ENODEV) {
			return err
		}
		return nil // the interface was removed meanwhile
	})
}
