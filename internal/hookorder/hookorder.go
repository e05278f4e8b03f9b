// SPDX-License-Identifier: Apache-2.0

// Package hookorder defines the position of a program among others at a hook, and reads it.
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

// Order is the wanted position of a program among the programs at a tcx hook. The zero value puts
// it behind the programs present at the time of attachment.
type Order struct {
	Where  Where
	Anchor string // name of a program, for Before and After
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

// ErrNoAnchor reports that the program named by an order is not at the hook.
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
	Name string `json:"name"` // the whole name if the program has BTF, else at most 15 bytes
}

func (n Program) String() string { return fmt.Sprintf("%d %q", n.ID, n.Name) }

// called reports whether a name is the program's: whole, or truncated like the kernel's.
func (n Program) called(name string) bool {
	return n.Name == name || kernelName(n.Name) == name || n.Name == kernelName(name) && len(n.Name) == unix.BPF_OBJ_NAME_LEN-1
}

// kernelName returns the kernel's truncated form of a name.
func kernelName(name string) string { return name[:min(len(name), unix.BPF_OBJ_NAME_LEN-1)] }

// Read returns a program with its name, as far as the caller may read it.
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

// List returns the programs at a hook except one, in the order of execution, and the hook's
// revision, 0 if it has none. The caller must be in the namespace of the hook.
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

// Among returns the position of the order among the programs at a hook. If several have the
// anchor's name, it is before the first or behind the last of them. If none has it, the error wraps
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

// Kept reports whether a position satisfies the order. Without its anchor every position does.
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

// Position is the position of a program at its hook.
type Position struct {
	Hook   string    `json:"hook"`     // like "tcx ingress of eth0"
	Number int       `json:"position"` // 1 runs first
	Of     int       `json:"programs"`
	Before []Program `json:"before,omitempty"` // programs running before it
	After  []Program `json:"after,omitempty"`
}

// String describes the position: "2 of 3, after cil_from_netdev".
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

// ReadPosition reads the position of a program at a hook. The caller must be in the namespace of
// the hook.
func ReadPosition(own uint32, at link.QueryOptions, hook fmt.Stringer) (p Position, attached bool, err error) {
	all, _, err := List(at, 0)
	if err != nil {
		return p, false, fmt.Errorf("list the programs at %s: %w", hook, err)
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
