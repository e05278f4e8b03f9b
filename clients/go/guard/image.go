// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/internal/guardstate"
)

// image is the linked program guard_socket with its maps. feature/guard/bpf/image creates it from
// the compiled object. So a client needs no ELF parser, no linker and no library for them.
type image struct {
	Instructions []byte
	BTF          []byte
	FuncInfo     []byte
	References   []reference
	Maps         []mapSpec
	Shared       int // offset in .rodata of guard_counters_shared
}

// reference is an instruction containing the descriptor of a map.
type reference struct {
	Instruction int // index, in instructions of 8 bytes
	Map         string
}

type mapSpec struct {
	Name                               string
	Type, Key, Value, MaxEntries, Flag uint32
	Inner                              *mapSpec
	Contents                           []byte // of the only element
	Frozen                             bool
}

const funcInfoBytes = 8 // struct bpf_func_info

// load loads the program and initializes its state. The caller owns both descriptors.
func load(l Limits) (program, state int, err error) {
	var im image
	if err := json.Unmarshal(socketImage, &im); err != nil {
		return -1, -1, fmt.Errorf("the guard's image: %w", err)
	}
	maps := map[string]int{}
	state = -1
	defer func() {
		for _, fd := range maps {
			unix.Close(fd)
		}
		if err != nil && state >= 0 {
			unix.Close(state)
			state = -1
		}
	}()
	for _, m := range im.Maps {
		if m.Name == ".rodata" && cpus() > guardstate.CounterSets {
			m.Contents[im.Shared] = 1
		}
		fd, inner, err := m.create()
		if err != nil {
			return -1, state, explain("map "+m.Name, err)
		}
		maps[m.Name] = fd
		switch m.Name {
		case "guard_states":
			state = inner
			if err := initialize(state, l); err != nil {
				return -1, state, err
			}
			if err := update(fd, state); err != nil {
				return -1, state, explain("map "+m.Name, err)
			}
		default:
			unix.Close(inner)
		}
	}
	program, err = im.program(maps)
	return program, state, err
}

func initialize(fd int, l Limits) error {
	s, err := guardstate.Map(fd)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.Init(l)
}

// explain adds the remedy to an error of bpf(2).
func explain(what string, err error) error {
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("load a guard, %s: %w: run it as root, or with CAP_BPF and CAP_NET_ADMIN", what, err)
	}
	return fmt.Errorf("load a guard, %s: %w (weir doctor lists the facilities of this kernel)", what, err)
}

// create creates a map. inner is a map of its element type, or -1.
func (m *mapSpec) create() (fd, inner int, err error) {
	inner = -1
	attr := struct {
		kind, key, value, entries, flags, inner, numa uint32
		name                                          [16]byte
	}{kind: m.Type, key: m.Key, value: m.Value, entries: m.MaxEntries, flags: m.Flag}
	copy(attr.name[:15], strings.TrimPrefix(m.Name, "."))
	if m.Inner != nil {
		if inner, _, err = m.Inner.create(); err != nil {
			return -1, -1, err
		}
		attr.inner = uint32(inner)
	}
	fd, err = bpf(unix.BPF_MAP_CREATE, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err == nil && m.Contents != nil {
		err = fill(fd, m.Contents, m.Frozen)
		if err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		unix.Close(inner)
		return -1, -1, err
	}
	return fd, inner, nil
}

// elem is the argument of BPF_MAP_UPDATE_ELEM.
type elem struct {
	fd, _             uint32
	key, value, flags uint64
}

// fill writes the only element of a data map.
func fill(fd int, contents []byte, frozen bool) error {
	if err := put(fd, unsafe.Pointer(&contents[0])); err != nil || !frozen {
		return err
	}
	attr := struct{ fd uint32 }{uint32(fd)}
	_, err := bpf(unix.BPF_MAP_FREEZE, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	return err
}

// update stores a map as the first element of an array of maps.
func update(fd, inner int) error {
	value := uint32(inner)
	return put(fd, unsafe.Pointer(&value))
}

func put(fd int, value unsafe.Pointer) error {
	var p runtime.Pinner
	defer p.Unpin()
	key := new(uint32)
	p.Pin(key)
	p.Pin(value)
	attr := elem{fd: uint32(fd), key: address(unsafe.Pointer(key)), value: address(value)}
	_, err := bpf(unix.BPF_MAP_UPDATE_ELEM, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	return err
}

// program loads the program with its maps.
func (im *image) program(maps map[string]int) (int, error) {
	for _, r := range im.References {
		fd, ok := maps[r.Map]
		if !ok {
			return -1, fmt.Errorf("the guard's image has no map %s", r.Map)
		}
		*(*uint32)(unsafe.Pointer(&im.Instructions[8*r.Instruction+4])) = uint32(fd)
	}
	btf, err := im.types()
	if err != nil {
		return -1, explain("types", err)
	}
	defer unix.Close(btf)
	var p runtime.Pinner
	defer p.Unpin()
	license := append([]byte("Dual BSD/GPL"), 0)
	log := make([]byte, 1<<20)
	attr := progLoad{
		kind: unix.BPF_PROG_TYPE_SOCKET_FILTER, count: uint32(len(im.Instructions) / 8), instructions: pinned(&p, im.Instructions),
		license: pinned(&p, license), btf: uint32(btf),
		funcInfoSize: funcInfoBytes, funcInfo: pinned(&p, im.FuncInfo), funcInfoCount: uint32(len(im.FuncInfo) / funcInfoBytes),
	}
	copy(attr.name[:], "guard_socket")
	fd, err := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	if err == nil || errors.Is(err, os.ErrPermission) {
		return fd, explained("program", err)
	}
	attr.logLevel, attr.logSize, attr.log = 1, uint32(len(log)), pinned(&p, log)
	if fd, again := bpf(unix.BPF_PROG_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); again == nil {
		return fd, nil
	}
	if strings.Contains(unix.ByteSliceToString(log), "BPF_STX uses reserved fields") {
		return -1, fmt.Errorf("load a guard: %w: compare-and-swap in BPF programs requires Linux 5.12", ErrUnsupported)
	}
	return -1, explain("program", fmt.Errorf("%w: verifier: %s", err, lastLines(unix.ByteSliceToString(log))))
}

func explained(what string, err error) error {
	if err == nil {
		return nil
	}
	return explain(what, err)
}

// lastLines keeps the end of a verifier's log, which contains the reason.
func lastLines(log string) string {
	lines := strings.Split(strings.TrimSpace(log), "\n")
	return strings.Join(lines[max(0, len(lines)-4):], "; ")
}

// progLoad is the argument of BPF_PROG_LOAD.
type progLoad struct {
	kind, count                            uint32
	instructions, license                  uint64
	logLevel, logSize                      uint32
	log                                    uint64
	kernel, flags                          uint32
	name                                   [16]byte
	ifindex, attachType, btf, funcInfoSize uint32
	funcInfo                               uint64
	funcInfoCount, lineInfoSize            uint32
	lineInfo                               uint64
	lineInfoCount, _                       uint32
}

// types loads the types of the program's functions. The verifier checks these functions separately.
func (im *image) types() (int, error) {
	var p runtime.Pinner
	defer p.Unpin()
	attr := struct {
		btf, log                uint64
		size, logSize, level, _ uint32
	}{btf: pinned(&p, im.BTF), size: uint32(len(im.BTF))}
	return bpf(unix.BPF_BTF_LOAD, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
}

func pinned(p *runtime.Pinner, b []byte) uint64 {
	p.Pin(&b[0])
	return address(unsafe.Pointer(&b[0]))
}

func address(p unsafe.Pointer) uint64 { return uint64(uintptr(p)) }

// bpf calls bpf(2). A returned descriptor is close-on-exec, as all BPF descriptors.
func bpf(command int, attr unsafe.Pointer, size uintptr) (int, error) {
	for {
		fd, _, errno := unix.Syscall(unix.SYS_BPF, uintptr(command), uintptr(attr), size)
		switch {
		case errno == 0:
			return int(fd), nil
		case errno != unix.EAGAIN && errno != unix.EINTR: // a signal, such as Go's preemption, interrupts the verifier
			return -1, errno
		}
	}
}

// cpus returns the number of possible CPUs of this machine. If it is unknown, cpus returns the
// smallest number with shared counters.
func cpus() int {
	text, err := os.ReadFile("/sys/devices/system/cpu/possible")
	if err != nil {
		return guardstate.CounterSets + 1
	}
	list := strings.TrimSpace(string(text))
	last, err := strconv.Atoi(list[strings.LastIndexAny(list, "-,")+1:])
	if err != nil {
		return guardstate.CounterSets + 1
	}
	return last + 1
}
