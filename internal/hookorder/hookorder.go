// SPDX-License-Identifier: Apache-2.0

// Package hookorder says where a program goes among the programs of others at a hook, and reads
// where it is.
package hookorder

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Order says where a program goes among the programs at a hook of tcx. The zero
// value puts it behind the programs that are there when it is attached.
type Order struct {
	Where  Where
	Anchor string // the name of a program, of Before and After
}

// Where is the kind of an order.
type Where string

// Orders.
const (
	First  Where = "first"
	Last   Where = "last"
	Before Where = "before"
	After  Where = "after"
)

// ErrNoAnchor says that the program is not there that an order names.
var ErrNoAnchor = errors.New("there is no such program")

func (o Order) String() string { return strings.TrimRight(string(o.Where)+" "+o.Anchor, " ") }

// MarshalText implements encoding.TextMarshaler: "first", "before cil_from_netdev".
func (o Order) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Order) UnmarshalText(b []byte) error {
	where, anchor, _ := strings.Cut(string(b), " ")
	*o = Order{Where(where), anchor}
	switch o.Where {
	case "", First, Last:
		if anchor == "" {
			return nil
		}
	case Before, After:
		if anchor != "" {
			return nil
		}
	}
	return fmt.Errorf("order %q: want first, last, before NAME or after NAME", b)
}

// Program is a program at a hook.
type Program struct {
	ID   uint32 `json:"id"`
	Name string `json:"name"` // the whole name where the program has BTF, else at most 15 bytes
}

func (n Program) String() string { return fmt.Sprintf("%d %q", n.ID, n.Name) }

// called says whether a name is the program's: whole, or as far as the kernel keeps names.
func (n Program) called(name string) bool {
	return n.Name == name || kernelName(n.Name) == name || n.Name == kernelName(name) && len(n.Name) == unix.BPF_OBJ_NAME_LEN-1
}

// kernelName is what the kernel keeps of a program's name.
func kernelName(name string) string { return name[:min(len(name), unix.BPF_OBJ_NAME_LEN-1)] }

// Read names a program as far as the caller may see it.
func Read(id uint32) Program {
	n := Program{ID: id}
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	if err != nil {
		return n
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return n
	}
	n.Name = info.Name
	if funcs, err := info.FuncInfos(); err == nil && len(funcs) > 0 && strings.HasPrefix(funcs[0].Func.Name, n.Name) {
		n.Name = funcs[0].Func.Name
	}
	return n
}

// List returns the programs at a hook in the order in which they run, but for one, and the hook's
// revision, 0 where it has none. The caller is in the namespace of the hook.
func List(at link.QueryOptions, but uint32) (out []Program, revision uint64, err error) {
	all, err := link.QueryPrograms(at)
	if err != nil {
		return nil, 0, err
	}
	for _, p := range all.Programs {
		if uint32(p.ID) != but {
			out = append(out, Read(uint32(p.ID)))
		}
	}
	return out, all.Revision, nil
}

// Among is the place that the order asks for among the programs at a hook. Where several have the
// name, it is before the first or behind the last of them. Where none has, the error wraps
// [ErrNoAnchor] and lists the programs.
func (o Order) Among(all []Program, hook fmt.Stringer) (link.Anchor, error) {
	switch o.Where {
	case First:
		return link.Head(), nil
	case Last:
		return link.Tail(), nil
	case Before:
		if i := slices.IndexFunc(all, o.named); i >= 0 {
			return link.BeforeProgramByID(ebpf.ProgramID(all[i].ID)), nil
		}
	case After:
		for _, n := range slices.Backward(all) {
			if o.named(n) {
				return link.AfterProgramByID(ebpf.ProgramID(n.ID)), nil
			}
		}
	default:
		return nil, nil
	}
	return nil, fmt.Errorf("order %s: %w at %s: %s: name one of them, wait for it, or leave order out", o, ErrNoAnchor, hook, there(all))
}

func (o Order) named(p Program) bool { return p.called(o.Anchor) }

// there lists programs in words.
func there(all []Program) string {
	if len(all) == 0 {
		return "no program is there"
	}
	names := make([]string, len(all))
	for i, n := range all {
		names[i] = n.String()
	}
	return "there are " + strings.Join(names, ", ")
}

// Kept says whether a position is as ordered. An order whose anchor is not there is kept:
// nothing is on its wrong side.
func (o Order) Kept(p Position) bool {
	switch o.Where {
	case First:
		return len(p.Before) == 0
	case Last:
		return len(p.After) == 0
	case Before:
		return !slices.ContainsFunc(p.Before, o.named)
	case After:
		return !slices.ContainsFunc(p.After, o.named)
	}
	return true
}

// Position is the place of a program among the programs at its hook.
type Position struct {
	Hook   string    `json:"hook"`     // like "tcx ingress of eth0"
	Number int       `json:"position"` // 1 is the first to run
	Of     int       `json:"programs"`
	Before []Program `json:"before,omitempty"` // those that run before it
	After  []Program `json:"after,omitempty"`
}

// String says the position in words: "2 of 3, after cil_from_netdev".
func (p Position) String() string {
	if p.Of == 1 {
		return "the only program"
	}
	out := fmt.Sprintf("%d of %d", p.Number, p.Of)
	if n := len(p.Before); n > 0 {
		out += ", after " + p.Before[n-1].short()
	} else if len(p.After) > 0 {
		out += ", before " + p.After[0].short()
	}
	return out
}

func (n Program) short() string {
	if n.Name == "" {
		return fmt.Sprintf("program %d", n.ID)
	}
	return n.Name
}

// ReadPosition reads where a program is at a hook. The caller is in the namespace of the hook.
func ReadPosition(own uint32, at link.QueryOptions, hook fmt.Stringer) (p Position, attached bool, err error) {
	all, _, err := List(at, 0)
	if err != nil {
		return p, false, fmt.Errorf("asking for the programs at %s: %w", hook, err)
	}
	p = Position{Hook: hook.String(), Of: len(all)}
	for i, x := range all {
		switch {
		case x.ID == own:
			p.Number = i + 1
		case p.Number == 0:
			p.Before = append(p.Before, x)
		default:
			p.After = append(p.After, x)
		}
	}
	return p, p.Number > 0, nil
}
