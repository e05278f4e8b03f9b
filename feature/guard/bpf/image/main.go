// SPDX-License-Identifier: Apache-2.0

// Command image links guard_socket of the compiled object with its maps and types, for
// clients/go/guard. A program guarding its own sockets then needs no library for BPF objects. `go
// generate ./feature/guard/bpf` runs it.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// image is the image format of clients/go/guard.
type image struct {
	Instructions []byte
	BTF          []byte
	FuncInfo     []byte
	References   []reference
	Maps         []mapSpec
	Shared       int
}

type reference struct {
	Instruction int
	Map         string
}

type mapSpec struct {
	Name                               string
	Type, Key, Value, MaxEntries, Flag uint32
	Inner                              *mapSpec `json:",omitempty"`
	Contents                           []byte   `json:",omitempty"`
	Frozen                             bool     `json:",omitempty"`
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: image OBJECTS CLIENT, two folders")
		os.Exit(2)
	}
	for _, end := range []string{"bpfel", "bpfeb"} {
		text, err := link(filepath.Join(os.Args[1], "guard_"+end+".o"))
		if err == nil {
			err = os.WriteFile(filepath.Join(os.Args[2], "socket_"+end+".image"), text, 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "image:", err)
			os.Exit(1)
		}
	}
}

// link returns the image of an object's guard_socket.
func link(object string) ([]byte, error) {
	spec, err := ebpf.LoadCollectionSpec(object)
	if err != nil {
		return nil, err
	}
	p := spec.Programs["guard_socket"]
	im := image{Shared: int(spec.Variables["guard_counters_shared"].Offset)}
	var types btf.Builder
	for i := range p.Instructions { // omit line info: it would double the size
		p.Instructions[i] = p.Instructions[i].WithSource(nil)
	}
	if im.FuncInfo, _, err = btf.MarshalExtInfos(p.Instructions, &types); err != nil {
		return nil, err
	}
	if im.BTF, err = types.Marshal(nil, &btf.MarshalOptions{Order: p.ByteOrder}); err != nil {
		return nil, err
	}
	var code bytes.Buffer
	if err := p.Instructions.Marshal(&code, p.ByteOrder); err != nil {
		return nil, err
	}
	im.Instructions = code.Bytes()
	used := map[string]bool{}
	for it := p.Instructions.Iterate(); it.Next(); {
		if it.Ins.IsLoadFromMap() {
			im.References = append(im.References, reference{int(it.Offset), it.Ins.Reference()})
			used[it.Ins.Reference()] = true
		}
	}
	for name, m := range spec.Maps {
		if used[name] {
			im.Maps = append(im.Maps, describe(m))
		}
	}
	slices.SortFunc(im.Maps, func(a, b mapSpec) int { return strings.Compare(a.Name, b.Name) })
	text, err := json.MarshalIndent(im, "", "\t")
	return append(text, '\n'), err
}

func describe(m *ebpf.MapSpec) mapSpec {
	out := mapSpec{Name: m.Name, Type: uint32(m.Type), Key: m.KeySize, Value: m.ValueSize, MaxEntries: m.MaxEntries, Flag: m.Flags}
	if m.InnerMap != nil {
		inner := describe(m.InnerMap)
		out.Inner, out.Value = &inner, 4
	}
	if strings.HasPrefix(m.Name, ".") {
		out.Contents = m.Contents[0].Value.([]byte)
		out.Frozen = strings.HasPrefix(m.Name, ".rodata")
	}
	return out
}
